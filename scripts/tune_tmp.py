import os, sys, math, time
sys.path.insert(0, "src"); sys.path.insert(0, ".")
import torch
from triton.testing import do_bench
from tamis.kernels.lists import Tiling, lists_from_mask, tile_areas
from tamis.kernels.reference import block_sparse as ref
from tamis.kernels.gluon import block_sparse as gb
from tamis.kernels.triton import block_sparse as tb
dev = "cuda"; P = lambda *a: print(*a, flush=True)
def mk(segs, hq, hkv, D, dt, off=0, needle=False, thd=False, seed=0):
    g = torch.Generator(device=dev).manual_seed(seed)
    keys = Tiling.of_segments(segs); T = keys.n_tokens
    if off:
        n = [s for s in segs]; skip = off; qs = []
        for s in n:
            d = min(s, skip); skip -= d; qs.append(s - d)
        qt = Tiling.of_segments(qs)
    else: qt = keys
    m = torch.rand(hq, len(qt), len(keys), device=dev, generator=g) < 0.4
    ks = torch.tensor(keys.starts, device=dev); q0 = torch.tensor(qt.starts, device=dev) + off
    m |= ((ks[None, :-1] < q0[1:, None]) & (ks[None, 1:] > q0[:-1, None]))[None]
    L = lists_from_mask(m, qt, keys, off)
    def t(h, n):
        x = torch.full((n + 5, h, D) if thd else (h, n + 5, D), float("nan"), device=dev, dtype=dt)
        x = x.transpose(0, 1) if thd else x
        x = x[:, :n]; x.copy_(torch.randn(h, n, D, device=dev, generator=g)); return x
    q, k, v = t(hq, T - off), t(hkv, T, ), t(hkv, T)
    if needle:
        q.mul_(0.3); idx = torch.randint(0, T, (hkv, T // 3), device=dev, generator=g)
        for h in range(hkv): k[h, idx[h]] = (q[h * (hq // hkv), (idx[h] - off).clamp(min=0)].float() * 12).to(dt)
    return q, k, v, L
def check(name, f, **kw):
    q, k, v, L = mk(**kw); sc = q.shape[-1] ** -0.5
    r, rl = ref.block_sparse_attention(q.float(), k.float(), v.float(), L, sc)
    torch.use_deterministic_algorithms(True)
    o, l = f(q, k, v, L, sc); torch.cuda.synchronize()
    torch.use_deterministic_algorithms(False)
    d = o.float() - r
    row = (d.norm(dim=-1) / r.norm(dim=-1)).max().item(); rms = (d.square().mean() / r.square().mean()).sqrt().item()
    ok = row < 0.02 and rms < 0.005 and (l - rl).abs().max().item() < 2e-3
    P(f"  {'ok ' if ok else 'BAD'} {name} {kw} row {row:.4f} rms {rms:.5f} lse {(l-rl).abs().max().item():.1e}")
    return ok
ODD = [1, 63, 111, 300, 1000]
CASES = [dict(segs=ODD, hq=8, hkv=2, D=128, dt=torch.bfloat16), dict(segs=ODD, hq=8, hkv=2, D=128, dt=torch.bfloat16, needle=True), dict(segs=ODD, hq=4, hkv=1, D=64, dt=torch.float16, thd=True),
         dict(segs=ODD, hq=3, hkv=3, D=96, dt=torch.bfloat16, thd=True), dict(segs=[300, 640, 777], hq=4, hkv=2, D=128, dt=torch.bfloat16, off=500, needle=True), dict(segs=[4096], hq=32, hkv=8, D=128, dt=torch.bfloat16), dict(segs=[4096], hq=14, hkv=2, D=64, dt=torch.bfloat16)]
def bench_lists(S, hq, dens, seed=0):
    g = torch.Generator(device=dev).manual_seed(seed); M = S // 128
    sc = torch.rand(hq, M, M, device=dev, generator=g).masked_fill_(torch.ones(M, M, device=dev, dtype=torch.bool).triu(0)[None], -1)
    kk = (torch.arange(M, device=dev).float() * dens).ceil().long()
    m = sc.argsort(-1, descending=True).argsort(-1) < kk[None, :, None]
    m |= torch.eye(M, dtype=torch.bool, device=dev)
    t = Tiling.of_segments([S]); return lists_from_mask(m, t, t)
_cache = {}
def bench(name, f, S=65536, hq=32, hkv=8, D=128, dens=0.2):
    key = (S, hq, hkv, D, dens)
    if key not in _cache:
        torch.manual_seed(0)
        _cache[key] = ([torch.randn(h, S, D, device=dev, dtype=torch.bfloat16) for h in (hq, hkv, hkv)], bench_lists(S, hq, dens))
    (q, k, v), L = _cache[key]
    try:
        f(q, k, v, L, D ** -0.5); torch.cuda.synchronize()
        lo, md, hi = do_bench(lambda: f(q, k, v, L, D ** -0.5), warmup=40, rep=150, quantiles=[0.2, 0.5, 0.8])
        fl = 4.0 * D * 128 * 128 * L.count.sum().item()
        P(f"{S}/d{D}/{dens} {name:34s} {md:8.3f} ms {fl/md/1e9:6.0f} TF/s  ({fl/hi/1e9:.0f}-{fl/lo/1e9:.0f})")
    except Exception as e: P(f"{S}/d{D}/{dens} {name} FAILED {type(e).__name__} {str(e)[:300]}")
def G(**kn): return lambda *a: gb.block_sparse_attention(*a, **kn)
def T(**kn): return lambda *a: tb.block_sparse_attention(*a, **kn)
def skewed(S, hq, seed=1):
    g = torch.Generator(device=dev).manual_seed(seed); M = S // 128
    d = torch.rand(hq, 1, 1, device=dev, generator=g) ** 3
    m = torch.rand(hq, M, M, device=dev, generator=g) < d
    m |= torch.eye(M, dtype=torch.bool, device=dev)
    t = Tiling.of_segments([S]); return lists_from_mask(m, t, t)
def host(name, f):
    q, k, v, L = mk([1024], 32, 8, 128, torch.bfloat16)
    for _ in range(5): f(q, k, v, L, .1)
    torch.cuda.synchronize(); t = time.perf_counter()
    for _ in range(50): f(q, k, v, L, .1)
    e = time.perf_counter() - t; torch.cuda.synchronize(); P(name, "host us per call", e / 50 * 1e6)
if __name__ == "__main__":
    P(torch.cuda.get_device_name(), torch.__version__)
    t0 = time.time()
    if not all([check("gluon", G(), **c) for c in CASES]): sys.exit("BAD")
    check("gluon nofence", G(FENCE=0), **CASES[1])
    check("triton", T(ONE=1, TMA=1), **CASES[0]); check("triton", T(ONE=1), **CASES[3]); check("triton", T(ONE=1, BN=64, W=4), **CASES[4])
    P("checks", time.time() - t0)
    for kn in (dict(), dict(FENCE=0), dict(REGS=240, PREGS=24), dict()):
        for d in (0.1, 0.2): bench(f"gluon {kn}", G(**kn), dens=d)
    bench("gluon", G(), dens=1.0); bench("gluon nofence", G(FENCE=0), dens=1.0)
    for kn in (dict(TMA=1), dict(MST=2), dict(ONE=1), dict(ONE=1, TMA=1), dict(ONE=1, TMA=1, STAGES=3), dict(W=4, BN=64, TMA=1), dict(W=4, BN=64, STAGES=3), dict(ONE=1, W=4, BN=64), dict(ONE=1, W=4, BN=64, TMA=1)): bench(f"triton {kn}", T(**kn))
    for kn in (dict(), dict(FENCE=0), dict(ST=2)): bench(f"gluon {kn}", G(**kn), S=32768, hq=14, hkv=2, D=64)
    for kn in (dict(BN=64, STAGES=3, W=4), dict(BN=64, STAGES=3, W=4, TMA=1), dict(BN=64, STAGES=4, W=4), dict(ONE=1, BN=64, STAGES=3, W=4), dict(ONE=1, BN=64, STAGES=3, W=4, TMA=1), dict(ONE=1, BN=128, STAGES=2, W=4, TMA=1)): bench(f"triton {kn}", T(**kn), S=32768, hq=14, hkv=2, D=64)
    for S in (8192, 16384): bench("gluon", G(), S=S, dens=0.1); bench("gluon", G(), S=S)
    _cache[(65536, 32, 8, 128, "skew")] = (_cache[(65536, 32, 8, 128, 0.2)][0], skewed(65536, 32))
    bench("gluon skewed heads", G(), dens="skew"); bench("triton skewed", T(), dens="skew")
    host("gluon", G()); host("triton", T()); host("triton tma", T(TMA=1))
