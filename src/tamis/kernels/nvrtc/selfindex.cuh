// What the kernels of a decode step over self-indexed records share. Head dim 128 with four scales, bfloat16.
//
// Launches may overlap (programmatic dependent launch): a kernel lets the next one start only once it has waited for
// what comes before it. So whatever ran before the step is done for all of them but the first: they may read the arena
// and the query before they wait, and what other launches of the step write only behind it.
//
// Letters as in kernels/triton/selfindex_*.py, which compute the same: rows are KV heads of all sequences, N slots, P
// parts, S splits; GROUP query heads share a KV head. tally [rows, TALLY]: 128 counters of keys' high parts, then how
// many programs of `attend` are done.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifndef GROUP
#define GROUP 4
#endif
#define DONE 128
#define EVERYTHING 0xffffffffu

#ifndef EMULATED
__device__ __forceinline__ void mma(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 transposed(u32 a) {
  u32 d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}
__device__ __forceinline__ u32 packed(float low, float high) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
__device__ __forceinline__ float exp2_(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// BYTES (4 or 8) on their way to shared memory; those of a commit belong together, `landed` waits for all but some
template <int BYTES>
__device__ __forceinline__ void copy(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from),
               "n"(BYTES)
               : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int FLYING>
__device__ __forceinline__ void landed() {
  asm volatile("cp.async.wait_group %0;" ::"n"(FLYING) : "memory");
}
// its sector will be wanted: let it come nearer
__device__ __forceinline__ void soon(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
__device__ __forceinline__ void wait_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ int rank_in_cluster() {
  u32 r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return (int)r;
}
__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release;\n barrier.cluster.wait.acquire;" ::: "memory");
}
template <class T>
__device__ __forceinline__ const T& of_rank(const T& mine, int rank) {
  u64 there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(&mine), "r"(rank));
  return *(const T*)there;
}
#define SHARED_IN_CLUSTER(kind, name) __shared__ kind name
#endif

__device__ __forceinline__ float low_of(u32 x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float high_of(u32 x) { return __uint_as_float(x & 0xffff0000u); }
__device__ __forceinline__ float bf16(const u16* p) { return __uint_as_float((u32)*p << 16); }

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int i = 16; i; i >>= 1) x += __shfl_xor_sync(EVERYTHING, x, i);
  return x;
}
