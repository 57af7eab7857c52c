import sys, time, torch, statistics as st
from unittest import mock
from onchip.vocab.triton import memory as M
from onchip.torch import linear_cross_entropy as lce
END=time.time()+float(sys.argv[1])
ROWS={ # name: H V T options
'frozen8b':(4096,128256,8192,dict(frozen=1)),'8b32k':(4096,128256,32768,{}),'1b32k':(2048,128256,32768,{}),'1b8k':(2048,128256,8192,{}),
'qwen8k':(1024,151936,8192,{}),'qwen32k':(1024,151936,32768,{}),'smol':(576,49152,16384,{}),'gemma2':(3584,256000,4096,dict(softcap=30.)),
'qwen05':(896,151936,16384,{}),'270m':(640,262144,8192,{}),'qwen4b':(2560,151936,16384,{}),'8b8k':(4096,128256,8192,{}),'frozen1b':(2048,128256,8192,dict(frozen=1)),'8b4k':(4096,128256,4096,{})}
def timed(f,n):
    s,e=torch.cuda.Event(True),torch.cuda.Event(True)
    torch.cuda.synchronize(); torch.cuda._sleep(60_000_000); s.record()
    for _ in range(n): f()
    e.record(); torch.cuda.synchronize(); return s.elapsed_time(e)/n
def row(name, variants, prof):
    H,V,T,o=ROWS[name]; o=dict(o); frozen=o.pop('frozen',0)
    torch.manual_seed(0)
    h=torch.randn(T,H,device='cuda',dtype=torch.bfloat16).requires_grad_(); w=(torch.randn(V,H,device='cuda',dtype=torch.float32)/H**.5).bfloat16().requires_grad_(not frozen)
    y=torch.randint(V,(T,),device='cuda')
    n=max(2048,min(T,4096)); 
    def floor():
        with torch.no_grad():
            z=h[:n]@w.T; z@w
            if not frozen: z.T@h[:n]
    for _ in range(2): floor()
    fl=min(timed(floor,2) for _ in range(3))*T/n
    eighth=T*V//2
    for vname,budget,patch in variants:
        if time.time()>END: print('time'); return
        seen=[]
        real=M.plan
        def plan(p,*a):
            c=patch(p) if patch else real(p,*a); seen.append((c,p)); return c
        with mock.patch.object(M,'plan',plan):
            def step():
                h.grad=w.grad=None
                lce(h,w,y,scratch_bytes=budget or eighth,**o).backward()
            try:
                torch.cuda.empty_cache(); step(); step(); torch.cuda.synchronize()
                h.grad=w.grad=None; base=torch.cuda.memory_allocated(); torch.cuda.reset_peak_memory_stats(); step(); torch.cuda.synchronize()
                peak=torch.cuda.max_memory_allocated()-base-2*H*T-(0 if frozen else 2*H*V)
                k=max(2,int(60/fl)); ms=st.median(timed(step,k) for _ in range(3))
                c,p=seen[-1]
                print(f'{name:9} {vname:10} floor {fl:6.2f} ms {ms:7.2f} x{ms/fl:.3f} mem {peak/2**20:6.0f} of {(budget or eighth)/2**20:6.0f} formula {M.scratch_bytes(p,c)/2**20:.0f} predicted {M.predict(p,c):.2f} C={c.token_chunk} v={c.vocab_chunk//256} w={c.weight_chunk//256} kept={c.kept} fwd={c.in_forward}',flush=True)
                if prof:
                    from torch.profiler import profile, ProfilerActivity
                    with profile(activities=[ProfilerActivity.CUDA]) as pr: step(); torch.cuda.synchronize()
                    ks=sorted(((e.self_device_time_total,e.count,e.key[:28]) for e in pr.key_averages()),reverse=True)[:9]
                    print('    ',[(round(a/1e3,2),b,k) for a,b,k in ks],flush=True)
            except Exception as ex: print(name,vname,repr(ex)[:300],flush=True); h.grad=w.grad=None
    del h,w,y; torch.cuda.empty_cache()
C=lambda n: (lambda p: M.TritonPlan(n,in_forward=True))
AUTO=('auto',None,None); OLD=('old',None,None)
if __name__=='__main__':
    prof=True
    row('frozen8b',[AUTO,('C1024',None,C(1024)),('C2048',None,C(2048)),('C4096',1<<40,C(4096))],prof)
    row('8b32k',[AUTO,('C2048',1<<40,C(2048)),('C4096',1<<40,C(4096))],prof)
    row('qwen8k',[AUTO,('C1024',1<<40,C(1024)),('C2048',1<<40,C(2048))],prof)
    row('1b32k',[AUTO],prof)
    row('gemma2',[('nobound',1<<40,None),AUTO],prof)
    row('qwen32k',[AUTO],prof)
    row('smol',[AUTO,('nobound',1<<40,None)],prof)
    row('1b8k',[AUTO],prof)
    row('qwen4b',[AUTO],prof)
    row('qwen05',[AUTO],prof)
    row('270m',[AUTO],prof)
    row('8b8k',[AUTO],prof)
