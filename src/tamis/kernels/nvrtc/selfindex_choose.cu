// The first three launches of a decode step over self-indexed records: which of them are attended.
//
// prepare: the query turned back and reordered for every part, and the table of what a code adds to a score.
// score:   a thread has two tokens, the table of the query lies in shared memory. The 16 entries of a group fill 16
//          banks, so that the lanes of a warp, each with another code, do not get in each other's way: a look-up a lane
//          and clock is what an SM can do, and the rest (a byte taken out, an add) has to fit beside it. Only each
//          EVERYth key is counted: counters are in the way of look-ups, and need only say about where the bar lies.
// choose:  a cluster of programs has a row. They count what lies above an interval of keys and every key in it, look at
//          each other's counters, and know the bar and where in the output each begins. An interval that does not hold
//          the bar (the samples were unlike the rest) is widened to all keys: the number that is chosen is exact.

#ifndef EVERY
#define EVERY 8  // slots of which one is counted by `score`; 0: none is
#endif
#ifndef CLUSTER
#define CLUSTER 8
#endif
#ifndef CHOOSERS
#define CHOOSERS 1024  // threads of a program of `choose`
#endif
#ifndef BINS
#define BINS 2048  // its counters
#endif
#define OWN (BINS / CHOOSERS)
#define KEY_LOW 512

// ----------------------------------------------------------------------------------------------------------- prepare

// grid (rows, P), 128 threads, each with one stored channel and then with 4 entries of the table
extern "C" __global__ void __launch_bounds__(128) prepare(
    const u16* q, const u8* order, const u16* mean, const uint4* centroids, const u16* spreads, const float* cos_,
    const float* sin_, const int* n_parts, float4* lut, float* span, u16* turned, u16* spread, float* bias, int* tally,
    int HKV, int P, int TALLY, int HALF, int q_batch, int q_head) {
  __shared__ float total[128], dots[4][GROUP], ends[4][2];
  const int t = threadIdx.x, row = blockIdx.x, b = row / HKV, h = row % HKV, p = blockIdx.y;
  wait_before();
  let_next();
  if (p == 0) {
    tally[(size_t)row * TALLY + t] = 0;
    if (t == 0) tally[(size_t)row * TALLY + DONE] = 0;
  }
  const size_t at = ((size_t)b * P + p) * HKV + h;
  soon(order + at * 128 + t);
  soon(mean + at * 128 + t);
  soon(spreads + at * 128 + t);
  soon(centroids + at * 256 + 2 * t);
  if (p >= n_parts[b]) return;
  const uint4 c0 = centroids[at * 256 + 2 * t], c1 = centroids[at * 256 + 2 * t + 1];
  const int o = order[at * 128 + t];
  const float m = bf16(mean + at * 128 + o), r = bf16(spreads + at * 128 + t);
  float c = 1.0f, s = 0.0f;
  int other = o;
  if (o < 2 * HALF) {
    const bool first = o < HALF;
    const size_t angle = ((size_t)b * P + p) * HALF + (first ? o : o - HALF);
    c = cos_[angle];
    s = first ? sin_[angle] : -sin_[angle];
    other = first ? o + HALF : o - HALF;
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < GROUP; i++) {
    const u16* from = q + (size_t)b * q_batch + (size_t)(h * GROUP + i) * q_head;
    const u32 bits = packed(bf16(from + o) * c + bf16(from + other) * s, 0.0f);
    const float x = low_of(bits);
    turned[(at * GROUP + i) * 128 + t] = (u16)bits;
    spread[(at * GROUP + i) * 128 + t] = (u16)packed(x * r, 0.0f);
    sum += x;
    const float dot = warp_sum(x * m);
    if ((t & 31) == 0) dots[t / 32][i] = dot;
  }
  total[t] = sum * (1.0f / GROUP);
  __syncthreads();
  float shift = 0.0f;
#pragma unroll
  for (int i = 0; i < GROUP; i++) {
    const float dot = (dots[0][i] + dots[1][i]) + (dots[2][i] + dots[3][i]);
    if (t == i) bias[at * GROUP + i] = dot;
    shift += dot * (1.0f / GROUP);
  }
  const int g = t / 4;
  const u32 words[8] = {c0.x, c0.y, c0.z, c0.w, c1.x, c1.y, c1.z, c1.w};
  float l[4], low, high;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    l[k] = low_of(words[2 * k]) * total[g] + high_of(words[2 * k]) * total[32 + g];
    l[k] += low_of(words[2 * k + 1]) * total[64 + g] + high_of(words[2 * k + 1]) * total[96 + g];
    if (g == 0) l[k] += shift;
    low = k ? fminf(low, l[k]) : l[k];
    high = k ? fmaxf(high, l[k]) : l[k];
  }
  lut[at * 128 + t] = make_float4(l[0], l[1], l[2], l[3]);
#pragma unroll
  for (int i = 1; i < 4; i <<= 1) {
    low = fminf(low, __shfl_xor_sync(EVERYTHING, low, i));
    high = fmaxf(high, __shfl_xor_sync(EVERYTHING, high, i));
  }
  low = warp_sum(t & 3 ? 0.0f : low);
  high = warp_sum(t & 3 ? 0.0f : high);
  if ((t & 31) == 0) {
    ends[t / 32][0] = low;
    ends[t / 32][1] = high;
  }
  __syncthreads();
  if (t < 2) span[at * 2 + t] = (ends[0][t] + ends[1][t]) + (ends[2][t] + ends[3][t]);
}

// ------------------------------------------------------------------------------------------------------------- score

// what 32 codes add up to: code i of the low halves is of group i, of the high halves of group 16 + i
__device__ __forceinline__ float looked_up(const float* table, const uint4& w) {
  const u32 words[4] = {w.x, w.y, w.z, w.w};
  float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int k = 0; k < 4; k++) {
    // four codes at once as byte offsets of entries of 4 bytes; then a byte is one instruction
    const u32 low = words[k] << 2 & 0x3c3c3c3cu, high = words[k] >> 2 & 0x3c3c3c3cu;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const char* entry = (const char*)table + (4 * k + i) * 64;
      s[i & 1] += *(const float*)(entry + __byte_perm(low, 0, 0x4440 + i));
      s[2 + (i & 1)] += *(const float*)(entry + 16 * 64 + __byte_perm(high, 0, 0x4440 + i));
    }
  }
  return (s[0] + s[1]) + (s[2] + s[3]);
}

struct Two {  // tokens of a thread: codes, words of what is alive, their part
  uint4 codes[2];
  u32 live[2];
  int part;
};

__device__ __forceinline__ Two two_at(
    const uint4* codes, const u32* live, const int* part_of, size_t row, int slot, int b, int N, int PER) {
  Two x;
#pragma unroll
  for (int n = 0; n < 2; n++) {
    const size_t at = row * N + slot + threadIdx.x + 128 * n;
    x.codes[n] = codes[at];
    x.live[n] = live[at >> 5];
  }
  x.part = part_of[b * (N / PER) + slot / PER];
  return x;
}

// grid (slots / (256 ITERS), rows), 128 threads
extern "C" __global__ void __launch_bounds__(128) score(
    const uint4* codes, const u32* live, const float4* lut, const float* span, const int* part_of, const int* slots,
    const int* n_parts, u16* keys, int* tally, int HKV, int P, int N, int TALLY, int PER, int ITERS) {
  __shared__ float4 table[128];
  __shared__ int counts[128];
  const int t = threadIdx.x, row = blockIdx.y, b = row / HKV, h = row % HKV;
  const int used = slots[b], begin = blockIdx.x * 256 * ITERS, parts = n_parts[b];
  Two next;
  if (begin < used) next = two_at(codes, live, part_of, row, begin, b, N, PER);  // while the table is being made
  wait_before();
  let_next();
  if (begin >= used) return;
  int have = next.part;
  const float4 entry = lut[((size_t)(b * P + have) * HKV + h) * 128 + t];
  float low = __int_as_float(0x7f800000), high = -low;
#pragma unroll 1
  for (int p = t & 31; p < parts; p += 32) {
    const float* s = span + ((size_t)(b * P + p) * HKV + h) * 2;
    low = fminf(low, s[0]);
    high = fmaxf(high, s[1]);
  }
#pragma unroll
  for (int i = 16; i; i >>= 1) {
    low = fminf(low, __shfl_xor_sync(EVERYTHING, low, i));
    high = fmaxf(high, __shfl_xor_sync(EVERYTHING, high, i));
  }
  const float wide = high - low;
  // not-a-number and infinities make all keys alike rather than any of them out of bounds
  const bool usable = wide > 1e-30f && wide < 1e30f;
  const float unit = usable ? 65023.0f / wide : 0.0f;
  low = usable ? low : 0.0f;
  counts[t] = 0;
  table[t] = entry;
  __syncthreads();
#pragma unroll 1
  for (int it = 0; it < ITERS; it++) {
    const int first = begin + it * 256;
    if (first >= used) break;
    const Two now = next;
    if (it + 1 < ITERS && first + 256 < used) next = two_at(codes, live, part_of, row, first + 256, b, N, PER);
    if (now.part != have) {
      __syncthreads();
      table[t] = lut[((size_t)(b * P + now.part) * HKV + h) * 128 + t];
      __syncthreads();
      have = now.part;
    }
    int key[2];
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const float far = fminf(fmaxf((looked_up((const float*)table, now.codes[n]) - low) * unit, 0.0f), 65023.0f);
      key[n] = now.live[n] >> (t & 31) & 1 ? (int)far + KEY_LOW : 0;
      keys[(size_t)row * N + first + t + 128 * n] = (u16)key[n];
    }
#if EVERY
    if (t % EVERY == 0) {
      // those that are not alive fall on counter 0, which nobody reads
      atomicAdd(&counts[key[0] >> 9], 1);
      atomicAdd(&counts[key[1] >> 9], 1);
    }
#endif
  }
#if EVERY
  __syncthreads();
  if (t > 0 && counts[t]) atomicAdd(tally + (size_t)row * TALLY + t, counts[t]);
#endif
}

// ------------------------------------------------------------------------------------------------------------ choose

struct alignas(4 * OWN) Bins {  // of a thread
  int of[OWN];
};

struct Counted {  // by a program of a cluster; the others read the first two
  Bins bins[CHOOSERS];
  int above, bin, left, level, before, sums[2][32];
};

// sum over this lane and those above it
__device__ __forceinline__ int from_here_up(int x) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 1; i < 32; i <<= 1) {
    const int y = __shfl_down_sync(EVERYTHING, x, i);
    if (lane + i < 32) x += y;
  }
  return x;
}

// an interval of keys that should hold the one with `need` keys in and above it, by the counters of `score`: every warp
// for itself
__device__ __forceinline__ void guessed(const int* tally, int need, int& from, int& to) {
#if EVERY
  const int lane = threadIdx.x & 31;
  // five times how far a count of samples strays, and what a few samples are worth
  const int margin = EVERY == 1 ? 0 : (int)(5.0f * sqrtf((float)need * EVERY)) + 4 * EVERY;
  int n[4], sum = 0;
#pragma unroll
  for (int k = 0; k < 4; k++) sum += n[k] = tally[4 * lane + k] * EVERY;
  int upward = from_here_up(sum), low = 1, high = 1;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    if (upward >= need + margin) low = max(low, 4 * lane + k);
    if (upward >= need - margin) high = max(high, 4 * lane + k);
    upward -= n[k];
  }
  from = __reduce_max_sync(EVERYTHING, low) * 512;
  // with hardly any to choose the bar may lie above all samples
  to = need > margin ? __reduce_max_sync(EVERYTHING, high) * 512 + 512 : 65536;
#else
  from = KEY_LOW;
  to = 65536;
#endif
}

__device__ __forceinline__ int key_of(const uint4& k, int j) {
  const u32 word = j < 4 ? (j < 2 ? k.x : k.y) : (j < 6 ? k.z : k.w);
  return j & 1 ? word >> 16 : word & 0xffff;
}

// grid (CLUSTER, rows) in clusters of CLUSTER, CHOOSERS threads: the `count` highest keys of a row, of equal ones the
// earlier, in order of their slots
extern "C" __global__ void __launch_bounds__(CHOOSERS, 1536 / CHOOSERS) choose(
    const uint4* keys, const int* tally, const int* slots, const int* count, int* chosen, int* n_chosen, int HKV, int N,
    int TALLY, int MOST) {
  constexpr int TILE = 8 * CHOOSERS, TEAM = CHOOSERS / 32;
  SHARED_IN_CLUSTER(Counted, mine);
  const int t = threadIdx.x, lane = t & 31, warp = t / 32;
  const int row = blockIdx.y, b = row / HKV, rank = rank_in_cluster();
  const int used = slots[b], need = min(count[b], MOST);
  wait_before();
  let_next();
  if (need <= 0 || used <= 0) {
    if (rank == 0 && t == 0) n_chosen[row] = 0;
    return;
  }
  const int tiles = (used + CLUSTER * TILE - 1) / (CLUSTER * TILE), begin = rank * tiles * TILE;
  const uint4* from_row = keys + (size_t)row * (N / 8);
  const uint4 none = make_uint4(0, 0, 0, 0);
  // what lies behind `used` in its block has key 0
  const uint4 kept = begin + 8 * t < used ? from_row[begin / 8 + t] : none;
  int from, to, bar, ties, over_before, on_before;
  guessed(tally + (size_t)row * TALLY, need, from, to);
  for (;;) {
    int shift = 0;
    while ((to - from - 1) >> shift >= BINS) shift++;
    mine.bins[t] = Bins{};
    if (t == 0) mine.above = mine.before = 0, mine.bin = -1;
    __syncthreads();
    int above = 0;
    for (int tile = 0; tile < tiles; tile++) {
      const int slot = begin + tile * TILE + 8 * t;
      const uint4 eight = tile == 0 ? kept : slot < used ? from_row[slot / 8] : none;
#pragma unroll
      for (int j = 0; j < 8; j++) {
        const int key = key_of(eight, j);
        above += key >= to;
        if (key >= from && key < to) atomicAdd(&mine.bins[0].of[(key - from) >> shift], 1);
      }
    }
    above = __reduce_add_sync(EVERYTHING, above);
    if (lane == 0) atomicAdd(&mine.above, above);
    sync_cluster();
    int all[OWN], lower[OWN], all_above = 0, own = 0;
    over_before = 0;
#pragma unroll
    for (int k = 0; k < OWN; k++) all[k] = lower[k] = 0;
#pragma unroll
    for (int r = 0; r < CLUSTER; r++) {
      const Counted& theirs = of_rank(mine, r);
      const int n = theirs.above;
      all_above += n;
      over_before += r < rank ? n : 0;
      if (t * OWN << shift >= to - from) continue;  // no key falls there
      const Bins x = theirs.bins[t];
#pragma unroll
      for (int k = 0; k < OWN; k++) {
        all[k] += x.of[k];
        lower[k] += r < rank ? x.of[k] : 0;
      }
    }
#pragma unroll
    for (int k = 0; k < OWN; k++) own += all[k];
    // keys in the bins of this thread and above; the warps' sums join in
    int upward = from_here_up(own);
    if (lane == 0) mine.sums[0][warp] = upward;
    __syncthreads();
    const int others = from_here_up(lane < TEAM ? mine.sums[0][lane] : 0);
    upward += all_above + __shfl_sync(EVERYTHING, others, warp) - mine.sums[0][warp];
    const int most = all_above + __shfl_sync(EVERYTHING, others, 0);
#pragma unroll
    for (int k = 0; k < OWN; k++) {
      if (upward >= need && upward - all[k] < need) {
        mine.bin = t * OWN + k;
        mine.left = need - (upward - all[k]);
        mine.level = lower[k];
      }
      upward -= all[k];
    }
    __syncthreads();
    const int at = mine.bin;
    int higher = 0;
#pragma unroll
    for (int k = 0; k < OWN; k++) higher += t * OWN + k > at ? lower[k] : 0;
    higher = __reduce_add_sync(EVERYTHING, higher);
    if (lane == 0 && higher) atomicAdd(&mine.before, higher);
    sync_cluster();  // nobody reads the counters any more
    over_before += mine.before;
    ties = mine.left;
    on_before = mine.level;
    bar = from + at;
    if (at < 0 && (from > KEY_LOW || all_above >= need)) {  // not in the interval
      from = KEY_LOW;
      to = 65536;
    } else if (at < 0) {  // fewer records than asked for
      bar = KEY_LOW - 1;
      ties = on_before = 0;
      if (rank == 0 && t == 0) n_chosen[row] = most;
      break;
    } else if (shift == 0) {
      if (rank == 0 && t == 0) n_chosen[row] = need;
      break;
    } else {
      from += at << shift;
      to = from + (1 << shift);
    }
    __syncthreads();  // all have read what the next round writes
  }
  for (int tile = 0; tile < tiles; tile++) {
    const int slot = begin + tile * TILE + 8 * t;
    const uint4 eight = tile == 0 ? kept : slot < used ? from_row[slot / 8] : none;
    int n = 0;  // keys above the bar, and in the high half those on it
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const int key = key_of(eight, j);
      n += (key > bar) + (key == bar ? 65536 : 0);
    }
    int upto = n;
#pragma unroll
    for (int i = 1; i < 32; i <<= 1) {
      const int y = __shfl_up_sync(EVERYTHING, upto, i);
      if (lane >= i) upto += y;
    }
    int* shared = mine.sums[tile & 1];
    if (lane == 31) shared[warp] = upto;
    __syncthreads();
    const int others = lane < TEAM ? shared[lane] : 0;
    const int ahead = __reduce_add_sync(EVERYTHING, lane < warp ? others : 0);
    const int tile_sum = __reduce_add_sync(EVERYTHING, others);
    int over = over_before + ((upto - n + ahead) & 0xffff), on = on_before + ((upto - n + ahead) >> 16);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const int key = key_of(eight, j), place = over + min(on, ties);
      if ((key > bar || (key == bar && on < ties)) && place < MOST) chosen[(size_t)row * MOST + place] = slot + j;
      over += key > bar;
      on += key == bar;
    }
    over_before += tile_sum & 0xffff;
    on_before += tile_sum >> 16;
  }
}
