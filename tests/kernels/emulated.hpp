// A CUDA kernel's source run on a CPU: a thread of the host for every thread of a block, blocks one after the other.
// Whatever a warp does together (shuffles, votes, matrix instructions) is an exchange between two barriers.
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
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

using std::min;
struct Index { int x, y, z; };
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

static thread_local Index threadIdx, blockIdx;
static std::unique_ptr<std::barrier<>> block_barrier;
static std::vector<std::unique_ptr<std::barrier<>>> warp_barriers;
static uint64_t board[32][32][6];  // warp, lane, what it shows the others

static int lane_() { return threadIdx.x & 31; }
static int warp_() { return threadIdx.x / 32; }
static void __syncthreads() { block_barrier->arrive_and_wait(); }
static void __syncwarp() { warp_barriers[warp_()]->arrive_and_wait(); }

template <class T> static T as(const void* p) { T x; std::memcpy(&x, p, sizeof x); return x; }
static float __uint_as_float(unsigned x) { return as<float>(&x); }
static float __int_as_float(int x) { return as<float>(&x); }

static float shown(float x, int lane) {
  board[warp_()][lane_()][0] = as<unsigned>(&x);
  __syncwarp();
  const unsigned y = board[warp_()][lane][0];
  __syncwarp();
  return __uint_as_float(y);
}
static float __shfl_sync(unsigned, float x, int lane) { return shown(x, lane & 31); }
static float __shfl_xor_sync(unsigned, float x, int mask) { return shown(x, lane_() ^ mask); }
static bool __any_sync(unsigned, bool x) {
  board[warp_()][lane_()][0] = x;
  __syncwarp();
  bool any = false;
  for (int i = 0; i < 32; i++) any |= board[warp_()][i][0] != 0;
  __syncwarp();
  return any;
}
static int atomicAdd(int* p, int n) { return __atomic_fetch_add(p, n, __ATOMIC_SEQ_CST); }
static unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t both = (uint64_t)b << 32 | a;
  unsigned made = 0;
  for (int i = 0; i < 4; i++) made |= (unsigned)(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return made;
}
static float exp2_(float x) { return std::exp2(x); }

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

static void launch(int grid_x, int grid_y, int threads, const std::function<void()>& kernel) {
  block_barrier = std::make_unique<std::barrier<>>(threads);
  warp_barriers.clear();
  for (int i = 0; i < threads / 32; i++) warp_barriers.push_back(std::make_unique<std::barrier<>>(32));
  std::vector<std::thread> host;
  for (int i = 0; i < threads; i++)
    host.emplace_back([=] {
      threadIdx = {i, 0, 0};
      for (int y = 0; y < grid_y; y++)
        for (int x = 0; x < grid_x; x++) {
          blockIdx = {x, y, 0};
          kernel();
          block_barrier->arrive_and_wait();
        }
    });
  for (auto& thread : host) thread.join();
}

#include KERNEL

template <class T> static T at_(void** p, int i) { return (T)p[i]; }

extern "C" void run_score(int x, int y, void** p, int* n) {
  launch(x, y, 256, [=] {
    score(at_<u32*>(p, 0), at_<u32*>(p, 1), at_<float*>(p, 2), at_<float*>(p, 3), at_<int*>(p, 4), at_<int*>(p, 5),
          at_<int*>(p, 6), at_<unsigned short*>(p, 7), at_<int*>(p, 8), n[0], n[1], n[2], n[3], n[4], n[5]);
  });
}
#if G == 32
extern "C" void run_attend(int x, int y, void** p, int* n) {
  launch(x, y, 32, [=] {
    attend(at_<unsigned short*>(p, 0), at_<u32*>(p, 1), at_<u32*>(p, 2), at_<float*>(p, 3), at_<char*>(p, 4),
           at_<char*>(p, 5), at_<char*>(p, 6), at_<u32*>(p, 7), at_<u32*>(p, 8), at_<uint4*>(p, 9),
           at_<unsigned short*>(p, 10), at_<unsigned short*>(p, 11), at_<int*>(p, 12), at_<int*>(p, 13),
           at_<int*>(p, 14), at_<uint4*>(p, 15), at_<uint4*>(p, 16), at_<int*>(p, 17), at_<long long*>(p, 18),
           at_<float*>(p, 19), at_<float*>(p, 20), at_<float*>(p, 21), n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7],
           n[8], n[9], n[10], n[11], n[12], n[13]);
  });
}
#endif
