import numpy as np, sys
def blocks(kind,T,rows=128,keys=128):
    q=np.arange(T)
    if kind=='causal': s=np.zeros(T,int); e=q+1
    elif kind=='full': s=np.zeros(T,int); e=np.full(T,T)
    elif kind.startswith('win'): w=int(kind[3:]); s=np.maximum(q-w+1,0); e=q+1
    elif kind.startswith('doc'): d=int(kind[3:]); s=q//d*d; e=q+1
    elif kind=='mixed':
        r=np.random.default_rng(0); s=np.zeros(T,int); at=0
        while at<T:
            l=int(r.choice([100,500,1000,2000,4000,8000])*r.uniform(.5,1.5)); s[at:at+l]=at; at+=l
        e=q+1
    t=-(-T//rows)
    ss=[s[i*rows:(i+1)*rows].min()//keys for i in range(t)]; ee=[-(-e[i*rows:(i+1)*rows].max()//keys) for i in range(t)]
    return np.array(ee)-np.array(ss)
def place0(n,tiles,planes,section):
    first=n//(section*tiles)*section
    width=np.minimum(section,planes-first); within=n-first*tiles
    return within//width, first+within%width
def sim(order,kind,T,planes,section,P=132,c=0.5,rows=128):
    L=blocks(kind,T,rows); tiles=len(L); n=np.arange(tiles*planes)
    i,pl=order(n,tiles,planes,section)
    assert len(set(zip(i.tolist(),pl.tolist())))==len(n)
    cost=L[tiles-1-i]+c
    load=np.bincount(n%P,weights=cost,minlength=P)
    return load.max()/(cost.sum()/P)
def greedy(kind,T,planes,section,P=132,c=.5,rows=128):
    import heapq
    L=blocks(kind,T,rows); tiles=len(L); n=np.arange(tiles*planes)
    i,pl=place0(n,tiles,planes,section); cost=L[tiles-1-i]+c
    h=[0.]*P
    for x in cost: heapq.heapreplace(h,h[0]+x)
    return max(h)/(cost.sum()/P)
def snake(n,tiles,planes,section,P=132):
    w=n//P; total=tiles*planes; last=total//P
    m=np.where((w%2==1)&(w<last), w*P+P-1-n%P, n)
    return place0(m,tiles,planes,section)
def rot(k):
    def f(n,tiles,planes,section,P=132):
        w=n//P; last=tiles*planes//P
        m=np.where(w<last, w*P+(n%P+k*w)%P, n)
        return place0(m,tiles,planes,section)
    return f
def hashed(n,tiles,planes,section,P=132):
    w=n//P; last=tiles*planes//P
    r=(w.astype(np.uint64)*np.uint64(2654435769)%np.uint64(2**32)).astype(np.uint64)
    m=np.where(w<last, w*P+(n%P+(r*np.uint64(P)>>np.uint64(32)).astype(int))%P, n)
    return place0(m,tiles,planes,section)
def skew(n,tiles,planes,section):
    i,pl=place0(n,tiles,planes,section)
    return (i+pl)%tiles,pl
ORD={'now':place0,'snake':snake,'rot8':rot(8),'rot37':rot(37),'rot53':rot(53),'hash':hashed,'skew':skew}
if __name__=='__main__':
    for (H,G) in ((32,4),(8,1),(40,5),(16,8)):
      for T in (2048,4096,8192,16384,32768,131072):
        sec=G*max(1,(32<<20)//(4*T*128))
        for kind in ('causal','full','win1024','doc1024','doc2048','mixed'):
            if H!=32 and T not in (2048,16384): continue
            print(H,T,sec,kind.ljust(8),' '.join(f'{k} {sim(f,kind,T,H,sec):.3f}' for k,f in ORD.items()),f'greedy {greedy(kind,T,H,sec):.3f}',flush=True)
