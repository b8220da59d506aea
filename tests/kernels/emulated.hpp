// CUDA kernels' source run on a CPU: a thread of the host for every thread of a block, blocks (or clusters of blocks) one
// after the other, forwards or backwards. Whatever a warp does together (shuffles, votes, matrix instructions) is an
// exchange between two barriers. An asynchronous copy is done when it is waited for and not before.
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#define EMULATED
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define SHARED_IN_CLUSTER(kind, name) static kind name##_of_all[CLUSTER]; kind& name = name##_of_all[rank_]

using std::max;
using std::min;
struct Index { int x, y, z; };
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float4 { float x, y, z, w; };
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

static thread_local Index threadIdx, blockIdx;
static thread_local int rank_;
static int warps_of_block;
static bool backwards;
static std::unique_ptr<std::barrier<>> all_barrier;
static std::vector<std::unique_ptr<std::barrier<>>> block_barriers, warp_barriers;
static uint64_t board[64][32][6];  // warp, lane, what it shows the others

static int lane_() { return threadIdx.x & 31; }
static int warp_() { return rank_ * warps_of_block + threadIdx.x / 32; }
static void __syncthreads() { block_barriers[rank_]->arrive_and_wait(); }
static void __syncwarp() { warp_barriers[warp_()]->arrive_and_wait(); }
static void sync_cluster() { all_barrier->arrive_and_wait(); }
static int rank_in_cluster() { return rank_; }
template <class T> static const T& of_rank(const T& mine, int rank) { return (&mine - rank_)[rank]; }
static void soon(const void*) {}
static void wait_before() {}
static void let_next() {}
static void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

template <class T> static T as(const void* p) { T x; std::memcpy(&x, p, sizeof x); return x; }
static float __uint_as_float(unsigned x) { return as<float>(&x); }
static float __int_as_float(int x) { return as<float>(&x); }
template <class T> static T __ldcg(const T* p) { return *p; }

template <class T> static T shown(T x, int lane) {
  static_assert(sizeof(T) == 4);
  board[warp_()][lane_()][0] = as<unsigned>(&x);
  __syncwarp();
  const unsigned y = board[warp_()][lane][0];
  __syncwarp();
  return as<T>(&y);
}
template <class T> static T __shfl_sync(unsigned, T x, int lane) { return shown(x, lane & 31); }
template <class T> static T __shfl_xor_sync(unsigned, T x, int mask) { return shown(x, lane_() ^ mask); }
template <class T> static T __shfl_up_sync(unsigned, T x, int n) { return shown(x, lane_() < n ? lane_() : lane_() - n); }
template <class T> static T __shfl_down_sync(unsigned, T x, int n) {
  return shown(x, lane_() + n > 31 ? lane_() : lane_() + n);
}
template <class F> static int together(int x, F join) {
  board[warp_()][lane_()][0] = (unsigned)x;
  __syncwarp();
  int made = (int)board[warp_()][0][0];
  for (int i = 1; i < 32; i++) made = join(made, (int)board[warp_()][i][0]);
  __syncwarp();
  return made;
}
static bool __any_sync(unsigned, bool x) { return together(x, [](int a, int b) { return a | b; }); }
static int __reduce_add_sync(unsigned, int x) { return together(x, [](int a, int b) { return a + b; }); }
static int __reduce_max_sync(unsigned, int x) { return together(x, [](int a, int b) { return max(a, b); }); }
static int atomicAdd(int* p, int n) { return __atomic_fetch_add(p, n, __ATOMIC_SEQ_CST); }
static unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t both = (uint64_t)b << 32 | a;
  unsigned made = 0;
  for (int i = 0; i < 4; i++) made |= (unsigned)(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return made;
}
static float exp2_(float x) { return std::exp2(x); }

struct Copy { void* to; const void* from; int bytes; };
static thread_local std::vector<Copy> begun;
static thread_local std::deque<std::vector<Copy>> flying;
template <int BYTES> static void copy(void* to, const void* from) { begun.push_back({to, from, BYTES}); }
static void commit() { flying.push_back(std::move(begun)), begun.clear(); }
template <int FLYING> static void landed() {
  for (; (int)flying.size() > FLYING; flying.pop_front())
    for (const Copy& x : flying.front()) std::memcpy(x.to, x.from, x.bytes);
}

static unsigned rounded(float x) {
  unsigned bits = as<unsigned>(&x);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static unsigned packed(float low, float high) { return rounded(low) | rounded(high) << 16; }
static double half_of(uint64_t x, int i) { return __uint_as_float(i ? x & 0xffff0000u : (unsigned)x << 16); }

// lane 4 t + c: A has rows t (registers 0, 2) and t + 8 (1, 3), columns 2 c, 2 c + 1 (0, 1) and 8 on (2, 3);
// B (4, 5) has the same columns as its rows, of its column t; D has rows t, t + 8, columns 2 c, 2 c + 1
static void mma(float* d, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  const unsigned mine[6] = {a0, a1, a2, a3, b0, b1};
  auto& all = board[warp_()];
  for (int i = 0; i < 6; i++) all[lane_()][i] = mine[i];
  __syncwarp();
  for (int i = 0; i < 4; i++) {
    const int row = lane_() / 4 + 8 * (i / 2), column = 2 * (lane_() & 3) + (i & 1);
    double sum = d[i];
    for (int k = 0; k < 16; k++)
      sum += half_of(all[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k & 1) *
             half_of(all[column * 4 + k % 8 / 2][4 + k / 8], k & 1);
    d[i] = (float)sum;
  }
  __syncwarp();
}
static unsigned transposed(unsigned x) {
  auto& all = board[warp_()];
  all[lane_()][0] = x;
  __syncwarp();
  const int row = lane_() / 4, column = 2 * (lane_() & 3);
  unsigned made = 0;
  for (int i = 0; i < 2; i++) made |= (all[(column + i) * 4 + row / 2][0] >> 16 * (row & 1) & 0xffff) << 16 * i;
  __syncwarp();
  return made;
}

static void launch(int grid_x, int grid_y, int threads, int cluster, const std::function<void()>& kernel) {
  warps_of_block = threads / 32;
  all_barrier = std::make_unique<std::barrier<>>(cluster * threads);
  block_barriers.clear(), warp_barriers.clear();
  for (int i = 0; i < cluster; i++) block_barriers.push_back(std::make_unique<std::barrier<>>(threads));
  for (int i = 0; i < cluster * warps_of_block; i++) warp_barriers.push_back(std::make_unique<std::barrier<>>(32));
  std::vector<std::thread> host;
  for (int i = 0; i < cluster * threads; i++)
    host.emplace_back([=] {
      threadIdx = {i % threads, 0, 0};
      rank_ = i / threads;
      const int clusters = grid_x / cluster * grid_y;
      for (int k = 0; k < clusters; k++) {
        const int at = backwards ? clusters - 1 - k : k;
        blockIdx = {at % (grid_x / cluster) * cluster + rank_, at / (grid_x / cluster), 0};
        kernel();
        all_barrier->arrive_and_wait();
      }
    });
  for (auto& thread : host) thread.join();
}

#include SHARED
#include CHOOSE
#include ATTEND

// a kernel's arguments are pointers, then ints: every one of them is handed over in a word of its own
template <class T> static T argument(void** p, int i) {
  if constexpr (std::is_pointer_v<T>) return (T)p[i];
  else return (T)(intptr_t)p[i];
}
template <class... T, size_t... I>
static void apply(void (*kernel)(T...), void** p, std::index_sequence<I...>) { kernel(argument<T>(p, I)...); }
template <class... T>
static void run(void (*kernel)(T...), int x, int y, int threads, int cluster, void** p) {
  launch(x, y, threads, cluster, [=] { apply(kernel, p, std::index_sequence_for<T...>{}); });
}
extern "C" void go_backwards(int yes) { backwards = yes; }
extern "C" void run_prepare(int x, int y, void** p) { run(prepare, x, y, 128, 1, p); }
extern "C" void run_score(int x, int y, void** p) { run(score, x, y, 128, 1, p); }
extern "C" void run_choose(int x, int y, void** p) { run(choose, x, y, CHOOSERS, CLUSTER, p); }
extern "C" void run_attend(int x, int y, void** p) { run(attend, x, y, 32 * WARPS, 1, p); }
