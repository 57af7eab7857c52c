import sys, time, torch, statistics as st
from unittest import mock
from onchip.vocab.triton import memory as M
from onchip.torch import linear_cross_entropy as lce
END=time.time()+float(sys.argv[1])
ROWS={ # name: H V T options
'frozen8b':(4096,128256,8192,dict(frozen=1)),'8b32k':(4096,128256,32768,{}),'1b32k':(2048,128256,32768,{}),'1b8k':(2048,128256,8192,{}),
'qwen8k':(1024,151936,8192,{}),'qwen32k':(1024,151936,32768,{}),'smol':(576,49152,16384,{}),'gemma2':(3584,256000,4096,dict(softcap=30.)),
'qwen05':(896,151936,16384,{}),'270m':(640,262144,8192,{}),'qwen4b':(2560,151936,16384,{}),'8b8k':(4096,128256,8192,{}),'frozen1b':(2048,128256,8192,dict(frozen=1)),'8b4k':(4096,128256,4096,{}),'8b512':(4096,128256,512,{}),'8b2k':(4096,128256,2048,{}),'1b8ksm':(2048,128256,8192,dict(label_smoothing=.1,z_loss=1e-4)),'8bnone':(4096,128256,4096,dict(reduction='none')),'g1b':(1152,262144,8192,{}),'8bign':(4096,128256,8192,dict(ign=1)),'frozen1b32k':(2048,128256,32768,dict(frozen=1))}
def timed(f,n):
    s,e=torch.cuda.Event(True),torch.cuda.Event(True)
    torch.cuda.synchronize(); torch.cuda._sleep(60_000_000); s.record()
    for _ in range(n): f()
    e.record(); torch.cuda.synchronize(); return s.elapsed_time(e)/n
def row(name, variants, prof):
    H,V,T,o=ROWS[name]; o=dict(o); frozen=o.pop('frozen',0); ign=o.pop('ign',0)
    torch.manual_seed(0)
    h=torch.randn(T,H,device='cuda',dtype=torch.bfloat16).requires_grad_(); w=(torch.randn(V,H,device='cuda',dtype=torch.float32)/H**.5).bfloat16().requires_grad_(not frozen)
    y=torch.randint(V,(T,),device='cuda')
    if ign: y[torch.rand(T,device='cuda')<.9]=-100
    n=min(T,4096)
    def floor():
        with torch.no_grad():
            for i in range(0,T,n):
                z=h[i:i+n]@w.T; z@w
                if not frozen: z.T@h[i:i+n]
    for _ in range(2): floor()
    fl=st.median(timed(floor,max(2,int(60*8192/T*4096/H/10))) for _ in range(3))
    eighth=max(256<<20,T*V//2)
    for vname,budget,patch in variants:
        if time.time()>END: print('time'); return
        seen=[]
        real=M.plan
        def plan(p,*a):
            c=patch(p) if patch else real(p,*a); seen.append((c,p)); return c
        with mock.patch.object(M,'plan',plan):
            def step():
                h.grad=w.grad=None
                l=lce(h,w,y,scratch_bytes=budget or eighth,**o); l.backward(torch.ones_like(l))
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

def right():
    torch.manual_seed(1)
    for H,V,T,C,o,frozen in ((1024,20000,3000,1024,{},0),(576,5003*8,2500,896,dict(label_smoothing=.1),0),(640,32768,1500,512,dict(softcap=20.),0),(1024,20000,3000,1024,dict(reduction='none'),1)):
        h=torch.randn(T,H,device='cuda').bfloat16(); w=(torch.randn(V,H,device='cuda')/H**.5*2).bfloat16(); y=torch.randint(V,(T,),device='cuda'); y[::7]=-100
        got={}
        for name in ('ref','plain','fwd','kept','scratch'):
            a=h.clone().requires_grad_(); b=w.clone().requires_grad_(not frozen)
            if name in('ref','plain'):
                f=torch.float32 if name=='ref' else torch.bfloat16
                z=(a.to(f)@b.to(f).T).float(); oo=dict(o)
                if 'softcap' in oo: c=oo.pop('softcap'); z=c*torch.tanh(z/c)
                l=torch.nn.functional.cross_entropy(z,y,**oo)
            else:
                R=(T+127)//128*128; VP=(V+255)//256*256
                pl=dict(fwd=M.TritonPlan(C,in_forward=True),kept=M.TritonPlan(T,4096,2048,0 if frozen else 512,1024),scratch=M.TritonPlan(T,VP,VP,0,R))[name]
                with mock.patch.object(M,'plan',lambda p,*x: pl):
                    l=lce(a,b,y,**o); l.backward(torch.linspace(.1,1,T,device='cuda') if l.ndim else torch.tensor(.7,device='cuda'))
                    got[name]=(l.detach(),a.grad,b.grad); continue
            l.backward(torch.linspace(.1,1,T,device='cuda') if l.ndim else torch.tensor(.7,device='cuda')); got[name]=(l.detach(),a.grad.float(),None if frozen else b.grad.float())
        for name in ('plain','fwd','kept','scratch'):
            print('right',H,o,frozen,name,[f'{((x.float()-r).norm()/r.norm()).item():.2e}' for x,r in zip(got[name],got['ref']) if r is not None],flush=True)
AUTO=('auto',None,None)
if __name__=='__main__':
    right()
    for r in ('8b32k','qwen8k','frozen8b','1b8k','8b512','8b8k','1b8ksm','smol','270m','qwen05','qwen4b','g1b','qwen32k','gemma2','8b2k','8b4k','8bnone','8bign','1b32k','frozen1b32k'): row(r,[AUTO],True)
