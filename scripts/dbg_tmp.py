import sys; sys.path.insert(0,"scripts"); sys.path.insert(0,"src")
from tune_tmp import *
def dbg(name, f, **kw):
    q,k,v,L=mk(**kw); sc=q.shape[-1]**-.5
    r,rl=ref.block_sparse_attention(q.float(),k.float(),v.float(),L,sc)
    for rep in range(2):
        torch.use_deterministic_algorithms(True); o,l=f(q,k,v,L,sc); torch.cuda.synchronize(); torch.use_deterministic_algorithms(False)
        bad=[]
        for h in range(q.shape[0]):
            for i,(s,n) in enumerate(zip(L.q_start.tolist(),L.q_len.tolist())):
                for g in range(0,n,64):
                    sl=slice(s+g,min(s+g+64,s+n))
                    el=(l[h,sl]-rl[h,sl]).abs().max().item(); eo=(o[h,sl].float()-r[h,sl]).abs().max().item()
                    if not(el<1e-3 and eo<.05): bad.append((h,i,g//64,n,L.count[h,i].item(),L.masked[h,i].item(),f"{el:.2g}",f"{eo:.2g}"))
        P(name,kw,"bad",len(bad),"of",L.count.numel(),bad[:14])
B=torch.bfloat16
dbg("1 item", G(), segs=[128],hq=1,hkv=1,D=128,dt=B)
dbg("4 items", G(), segs=[512],hq=1,hkv=1,D=128,dt=B)
dbg("many", G(), segs=[4096],hq=8,hkv=2,D=128,dt=B)
dbg("many nofence", G(FENCE=0), segs=[4096],hq=8,hkv=2,D=128,dt=B)
dbg("short", G(), segs=[1,63,111],hq=2,hkv=1,D=128,dt=B)
dbg("odd", G(), segs=ODD,hq=8,hkv=2,D=128,dt=B)
dbg("d64", G(), segs=[4096],hq=8,hkv=2,D=64,dt=B)
dbg("d64 odd", G(), segs=ODD,hq=8,hkv=2,D=64,dt=B)
