// The last launch of a decode step over self-indexed records: attention over the chosen ones and the whole tokens.
//
// A program of WARPS warps has a split, a warp a run of its records, copied STAGES - 1 steps ahead into shared memory
// by each lane for itself. Nothing of a record ever moves between threads but values once. Lane 4 t + c has of tokens t
// and t + 8 the groups 8 c .. 8 c + 7: contiguous bytes in every plane, and, because a product does not mind the order
// of its inner dimension, exactly its share of the operand K [16 tokens, groups] of a matrix instruction, against Q^T
// [groups, 8 heads]. Values become the operand V^T [16 channels, 16 tokens] by one 8 x 8 transposition of packed bytes
// a word: a 16-bit unit is two bytes of a token, and afterwards a register has the same two bytes of two tokens, whose
// codes are unpacked in pairs. Scores [tokens, heads] turn round the same way. Codes are put into a mantissa: as
// 1 + code / 4, so (code - 1.5) = 4 x - 5.5. The program that is done last with a row merges its splits, in their order
// whatever order they were done in.

#ifndef WARPS
#define WARPS 4  // of a program of `attend`
#endif
#ifndef STAGES
#define STAGES 3
#endif
#ifndef RESIDENT
#define RESIDENT 3  // programs of `attend` on an SM: what registers a thread may have
#endif
#define MOST_SPLIT 512
#define MASKED (-1.2089258e24f)   // -(2 ** 80)
#define NOTHING (-1.0995116e12f)  // -(2 ** 40)

struct Words {  // of a token: its lane's 8 groups, and all scales
  uint2 codes, residuals, values;
  u32 key_scales, value_scales;
};

// what a scale byte stands for: 2 ** ((byte - 160) / 16), 0 is 0
__device__ __forceinline__ float scale_of(u32 byte) {
  const float x = exp2_(fmaf((float)byte, 0.0625f, -10.0f));
  return byte ? x : 0.0f;
}

// a pair of 2-bit codes at bits SHIFT of both halves, as two bfloat16 numbers 1 + code / 4
__device__ __forceinline__ u32 quarters(u32 x, int shift) {
  return ((shift >= 5 ? x >> (shift - 5) : x << (5 - shift)) & 0x00600060u) | 0x3f803f80u;
}

// bytes I and I + 1 of a word in the low bytes of both halves
__device__ __forceinline__ u32 halves(u32 w, int i) { return __byte_perm(w, 0, i ? 0x4342 : 0x4140); }

struct State {  // of a lane: heads 2 c and 2 c + 1
  float top[2], sum[2], weights[4][2], acc[8][4];
};

__device__ __forceinline__ void empty(State& x) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    x.top[i] = MASKED;
    x.sum[i] = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; j++) x.weights[j][i] = 0.0f;
  }
#pragma unroll
  for (int i = 0; i < 8; i++)
#pragma unroll
    for (int k = 0; k < 4; k++) x.acc[i][k] = 0.0f;
}

// scores s[0..1] of token t and s[2..3] of token t + 8, for heads 2 c, 2 c + 1 → weights in place, state moved on
__device__ __forceinline__ void softmax(State& x, float* s, const bool* keep) {
  float alpha[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    s[i] = keep[0] ? s[i] : MASKED;
    s[2 + i] = keep[1] ? s[2 + i] : MASKED;
    float m = fmaxf(s[i], s[2 + i]);
    m = fmaxf(m, __shfl_xor_sync(EVERYTHING, m, 4));
    m = fmaxf(m, __shfl_xor_sync(EVERYTHING, m, 8));
    m = fmaxf(m, __shfl_xor_sync(EVERYTHING, m, 16));
    m = fmaxf(m, x.top[i]);
    alpha[i] = exp2_(x.top[i] - m);
    x.top[i] = m;
    s[i] = keep[0] ? exp2_(s[i] - m) : 0.0f;
    s[2 + i] = keep[1] ? exp2_(s[2 + i] - m) : 0.0f;
  }
  if (__any_sync(EVERYTHING, alpha[0] != 1.0f || alpha[1] != 1.0f)) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      x.sum[i] *= alpha[i];
#pragma unroll
      for (int j = 0; j < 4; j++) x.weights[j][i] *= alpha[i];
#pragma unroll
      for (int k = 0; k < 8; k++) {
        x.acc[k][i] *= alpha[i];
        x.acc[k][2 + i] *= alpha[i];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2; i++) x.sum[i] += s[i] + s[2 + i];
}

__device__ __forceinline__ void step(
    State& x, const Words* w, const bool* keep, const char* table, const u32 (*q)[2][2], const u32 (*r)[2][2],
    const float (*offset)[2], float scale, int c) {
  const int lane = threadIdx.x & 31;
  u32 k[2][4][4];  // token, plane, pair of groups
#pragma unroll
  for (int n = 0; n < 2; n++) {
    u64 entry[8];
    const u32 word[2] = {w[n].codes.x >> (c & 2) * 2, w[n].codes.y >> (c & 2) * 2};
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const u32 offset_ = (i & 3 ? word[i / 4] >> (8 * (i & 3) - 3) : word[i / 4] << 3) & 0x78;
      entry[i] = *(const u64*)(table + (c * 1024 | offset_) + i * 128);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 a0 = (u32)entry[2 * i], a1 = (u32)(entry[2 * i] >> 32);
      const u32 b0 = (u32)entry[2 * i + 1], b1 = (u32)(entry[2 * i + 1] >> 32);
      k[n][0][i] = __byte_perm(a0, b0, 0x5410);
      k[n][1][i] = __byte_perm(a0, b0, 0x7632);
      k[n][2][i] = __byte_perm(a1, b1, 0x5410);
      k[n][3][i] = __byte_perm(a1, b1, 0x7632);
    }
  }
  // a lane works out its own plane's scales for its quad
  const int shift = 8 * c;
  float own[4] = {scale_of(w[0].key_scales >> shift & 255), scale_of(w[1].key_scales >> shift & 255),
                  scale_of(w[0].value_scales >> shift & 255), scale_of(w[1].value_scales >> shift & 255)};
  // two sums, so that a product waits for the last but one
  float s[4] = {0.0f, 0.0f, 0.0f, 0.0f}, s_[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int j = 0; j < 4; j++) {
    mma(s, k[0][j][0], k[1][j][0], k[0][j][1], k[1][j][1], q[j][0][0], q[j][0][1]);
    mma(s_, k[0][j][2], k[1][j][2], k[0][j][3], k[1][j][3], q[j][1][0], q[j][1][1]);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) s[i] += s_[i];
  u32 y[2][4];
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) y[n][i] = halves(i < 2 ? w[n].residuals.x : w[n].residuals.y, 2 * (i & 1));
#pragma unroll
  for (int j = 0; j < 4; j++) {
    float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int e = 0; e < 2; e++)
      mma(d, quarters(y[0][2 * e], 2 * j), quarters(y[1][2 * e], 2 * j), quarters(y[0][2 * e + 1], 2 * j),
          quarters(y[1][2 * e + 1], 2 * j), r[j][e][0], r[j][e][1]);
    const float k0 = __shfl_sync(EVERYTHING, own[0], (lane & 28) | j);
    const float k1 = __shfl_sync(EVERYTHING, own[1], (lane & 28) | j);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      s[i] = fmaf(fmaf(4.0f, d[i], -offset[j][i]), k0, s[i]);
      s[2 + i] = fmaf(fmaf(4.0f, d[2 + i], -offset[j][i]), k1, s[2 + i]);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++) s[i] *= scale;
  softmax(x, s, keep);
  // packed bytes turned round: word 0 has rows of channels t, word 1 of channels t + 8
  const u32 v00 = transposed(w[0].values.x), v01 = transposed(w[0].values.y);
  const u32 v10 = transposed(w[1].values.x), v11 = transposed(w[1].values.y);
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const float g0 = __shfl_sync(EVERYTHING, own[2], (lane & 28) | j);
    const float g1 = __shfl_sync(EVERYTHING, own[3], (lane & 28) | j);
    const float p[4] = {s[0] * g0, s[1] * g0, s[2] * g1, s[3] * g1};
    // the sum is of the rounded weights: 5.5 times it is taken from a product with them, and with thousands of like
    // weights their rounding all goes one way
    const u32 near = packed(p[0], p[1]), far = packed(p[2], p[3]);
    x.weights[j][0] += low_of(near) + low_of(far);
    x.weights[j][1] += high_of(near) + high_of(far);
    const u32 b0 = transposed(near), b1 = transposed(far);
#pragma unroll
    for (int e = 0; e < 2; e++)
      mma(x.acc[2 * j + e], quarters(v00, 8 * e + 2 * j), quarters(v01, 8 * e + 2 * j), quarters(v10, 8 * e + 2 * j),
          quarters(v11, 8 * e + 2 * j), b0, b1);
  }
}

// 16 whole tokens: keys and values bfloat16 [.., 128] of tokens `at` and `at` + 8 of the lane
__device__ __forceinline__ void whole_step(
    State& x, const uint4* keys, const uint4* values, size_t at, const bool* keep, const u32 (*q)[2], float scale,
    int c) {
  float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  const uint4 none = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int i = 0; i < 4; i++) {  // a lane has channels 32 c .. 32 c + 31 of its tokens, 8 at a time
    const uint4 k0 = keep[0] ? keys[at * 16 + c * 4 + i] : none, k1 = keep[1] ? keys[(at + 8) * 16 + c * 4 + i] : none;
    mma(s, k0.x, k1.x, k0.y, k1.y, q[2 * i][0], q[2 * i][1]);
    mma(s, k0.z, k1.z, k0.w, k1.w, q[2 * i + 1][0], q[2 * i + 1][1]);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) s[i] *= scale;
  softmax(x, s, keep);
  const u32 b0 = transposed(packed(s[0], s[1])), b1 = transposed(packed(s[2], s[3]));
#pragma unroll
  for (int i = 0; i < 4; i++) {  // channels 32 i + 8 c .. + 7
    const uint4 v0 = keep[0] ? values[at * 16 + i * 4 + c] : none;
    const uint4 v1 = keep[1] ? values[(at + 8) * 16 + i * 4 + c] : none;
    mma(x.acc[2 * i], transposed(v0.x), transposed(v0.y), transposed(v1.x), transposed(v1.y), b0, b1);
    mma(x.acc[2 * i + 1], transposed(v0.z), transposed(v0.w), transposed(v1.z), transposed(v1.w), b0, b1);
  }
}

__device__ __forceinline__ float over_tokens(float x) {
  x += __shfl_xor_sync(EVERYTHING, x, 4);
  x += __shfl_xor_sync(EVERYTHING, x, 8);
  return x + __shfl_xor_sync(EVERYTHING, x, 16);
}

// what a lane needs of its two tokens, on its way to shared memory and there: codes, residuals, values, scales
typedef uint2 Staged[2][4][32];

struct Planes {  // of a row, and a lane's share of a record in it
  const char *codes, *residuals, *values;
  const u32 *key_scales, *value_scales;
};

__device__ __forceinline__ void stage(Staged& to, const Planes& from, const int* slots, int i, int end) {
  const int lane = threadIdx.x & 31, t = lane >> 2;
  if (i >= end) return;
#pragma unroll
  for (int n = 0; n < 2; n++) {
    const u32 slot = slots[min(i + t + 8 * n, end - 1)];
    copy<8>(&to[n][0][lane], from.codes + (size_t)slot * 16);
    copy<8>(&to[n][1][lane], from.residuals + (size_t)slot * 32);
    copy<8>(&to[n][2][lane], from.values + (size_t)slot * 32);
    copy<4>(&to[n][3][lane].x, from.key_scales + slot);
    copy<4>(&to[n][3][lane].y, from.value_scales + slot);
  }
}

struct Kept {  // of a program: warps' outputs times their denominators
  float out[WARPS][GROUP][128], top[WARPS][GROUP], den[WARPS][GROUP];
};

// whole tokens begin .. end of a row, a warp's
__device__ __forceinline__ void whole_run(
    Kept& kept, const u16* q, const uint4* keys, const uint4* values, size_t first, int begin, int end, int exact,
    int E, float scale, int q_head) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, t = lane >> 2, c = lane & 3;
  State x;
  empty(x);
  u32 b_q[8][2];
  const u32* p_q = (const u32*)(q + (size_t)t * q_head) + c * 16;
#pragma unroll
  for (int i = 0; i < 8; i++)
#pragma unroll
    for (int e = 0; e < 2; e++) b_q[i][e] = t < GROUP ? p_q[2 * i + e] : 0;
#pragma unroll 1
  for (int i = begin; i < end; i += 16) {
    bool keep[2];
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const int at = i + t + 8 * n;
      keep[n] = at < end && (at < exact || at >= E);
    }
    whole_step(x, keys, values, first + i + t, keep, b_q, scale, c);
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int head = 2 * c + i;
    const float sum = over_tokens(x.sum[i]);
    if (head >= GROUP) continue;
    if (t == 0) kept.den[warp][head] = sum;
    if (t == 0) kept.top[warp][head] = sum == sum ? x.top[i] : 0.0f;
#pragma unroll
    for (int k = 0; k < 8; k++)
#pragma unroll
      for (int e = 0; e < 2; e++)
        kept.out[warp][head][32 * (k / 2) + 8 * (t / 2) + 4 * (k & 1) + 2 * e + (t & 1)] = x.acc[k][2 * e + i];
  }
}

// the splits of a row that are real, merged in their order: a warp has a head, a lane four channels
__device__ __forceinline__ void merge(
    const float* part, const float* part_top, const float* part_den, u16* out, float* lse, size_t row, int S,
    int chosen, int wholes, int o_head) {
  const int lane = threadIdx.x & 31;
#pragma unroll 1
  for (int head = threadIdx.x / 32; head < GROUP; head += WARPS) {
    const size_t at = (row * GROUP + head) * S;
    float m = MASKED, d = 0.0f, acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
    for (int i = 0; i < chosen + wholes; i += 8) {
      float4 o[8];
      float top[8], den[8], best = m;
#pragma unroll
      for (int k = 0; k < 8; k++) {
        const bool real = i + k < chosen + wholes;
        const size_t s = at + (i + k < chosen ? i + k : real ? S - wholes + (i + k - chosen) : 0);
        // of other SMs: not from this one's own cache
        o[k] = __ldcg((const float4*)(part + s * 128) + lane);
        den[k] = __ldcg(part_den + s);
        top[k] = real ? __ldcg(part_top + s) : MASKED;
        best = fmaxf(best, top[k]);
      }
      const float old = exp2_(m - best);
      d *= old;
#pragma unroll
      for (int j = 0; j < 4; j++) acc[j] *= old;
      m = best;
#pragma unroll
      for (int k = 0; k < 8; k++) {
        if (!(top[k] > NOTHING)) continue;
        const float w = exp2_(top[k] - m);
        d = fmaf(w, den[k], d);
        acc[0] = fmaf(w, o[k].x, acc[0]);
        acc[1] = fmaf(w, o[k].y, acc[1]);
        acc[2] = fmaf(w, o[k].z, acc[2]);
        acc[3] = fmaf(w, o[k].w, acc[3]);
      }
    }
    const bool seen = d > 0.0f || d != d;
#pragma unroll
    for (int j = 0; j < 4; j++)
      out[(size_t)head * o_head + 4 * lane + j] = (u16)packed(seen ? acc[j] / d : 0.0f, 0.0f);
    if (lane == 0)
      lse[row * GROUP + head] = seen ? (m + log2f(d)) * 0.6931471805599453f : __int_as_float(0xff800000);
  }
}

// grid (S, rows), 32 WARPS threads; the last WHOLES splits are of whole tokens. scale is given as the bits of a float
extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT) attend(
    const u16* q, const u32* turned, const u32* spread, const float* bias, const char* codes, const char* residuals,
    const char* values, const u32* key_scales, const u32* value_scales, const uint4* centroids, const u16* value_scale,
    const u16* value_mean, const int* part_of, const int* chosen, const int* n_chosen, const uint4* whole_keys,
    const uint4* whole_values, const int* n_exact, const long long* open_end, float* part, float* part_top,
    float* part_den, int* tally, u16* out, float* lse, int scale_bits, int HKV, int P, int N, int TALLY, int MOST,
    int S, int WHOLES, int SPLIT, int E, int W, int q_batch, int q_head, int o_batch, int o_head, int PER) {
  __shared__ uint4 table[256];  // 4 KB: centroids of the part, 8 bytes a group and code
  __shared__ Staged staged[WARPS][STAGES];
  __shared__ Kept kept;
  __shared__ int mine[MOST_SPLIT];
  __shared__ int arrived;
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, t = lane >> 2, c = lane & 3;
  const int row = blockIdx.y, b = row / HKV, h = row % HKV, split = blockIdx.x;
  const float scale = __int_as_float(scale_bits);
  const bool of_whole = split >= S - WHOLES;
  if (of_whole) {  // they are not chosen: no need to wait
    const int end = (int)open_end[b], runs = WHOLES * WARPS;
    const int each = ((W + runs - 1) / runs + 15) / 16 * 16, begin = ((split - (S - WHOLES)) * WARPS + warp) * each;
    whole_run(kept, q + (size_t)b * q_batch + (size_t)(h * GROUP) * q_head, whole_keys, whole_values, (size_t)row * W,
              begin, min(begin + each, end), n_exact[b], E, scale, q_head);
  }
  wait_before();
  let_next();
  const int n = n_chosen[row], splits = (n + SPLIT - 1) / SPLIT, lo = split * SPLIT, hi = min(lo + SPLIT, n);
  if (!of_whole) {
    // what lies behind n comes too, rather than that all wait for n
    const int* slots = chosen + (size_t)row * MOST + lo;
    for (int i = threadIdx.x; i < SPLIT && lo + i < MOST; i += 32 * WARPS) mine[i] = slots[i];
    if (lo >= n) return;
    __syncthreads();
    const int* parts = part_of + b * (N / PER);
    const size_t begins = (size_t)row * N;
    const Planes from = {codes + begins * 16 + (c & 1) * 8, residuals + begins * 32 + c * 8,
                         values + begins * 32 + c * 8, key_scales + begins, value_scales + begins};
    const int each = ((hi - lo + WARPS - 1) / WARPS + 15) / 16 * 16;
    const int begin = warp * each, end = min(begin + each, hi - lo), steps = begin < end ? (end - begin + 15) / 16 : 0;
    const int first = parts[mine[0] / PER], last = parts[mine[hi - lo - 1] / PER];
    float top[2] = {MASKED, MASKED}, den[2] = {0.0f, 0.0f};
    for (int i = threadIdx.x; i < WARPS * GROUP * 128; i += 32 * WARPS) (&kept.out[0][0][0])[i] = 0.0f;
#pragma unroll 1
    for (int p = first; p <= last; p++) {
      const size_t at = (size_t)(b * P + p) * HKV + h;
#pragma unroll 1
      for (int i = 0; i < STAGES - 1; i++) {
        stage(staged[warp][i], from, mine, begin + 16 * i, end);
        commit();
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < 8 / WARPS; i++)
        table[threadIdx.x + 32 * WARPS * i] = centroids[at * 256 + threadIdx.x + 32 * WARPS * i];
      u32 b_q[4][2][2], b_r[4][2][2];
      float offset[4][2];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        float total = 0.0f;
#pragma unroll
        for (int e = 0; e < 2; e++)
#pragma unroll
          for (int f = 0; f < 2; f++) {
            const size_t i = (at * GROUP + t) * 64 + j * 16 + 4 * c + 2 * e + f;
            b_q[j][e][f] = t < GROUP ? turned[i] : 0;
            b_r[j][e][f] = t < GROUP ? spread[i] : 0;
            total += low_of(b_r[j][e][f]) + high_of(b_r[j][e][f]);
          }
        total += __shfl_xor_sync(EVERYTHING, total, 1);
        total += __shfl_xor_sync(EVERYTHING, total, 2);
#pragma unroll
        for (int i = 0; i < 2; i++) offset[j][i] = 5.5f * __shfl_sync(EVERYTHING, total, 4 * (2 * c + i));
      }
      __syncthreads();
      State x;
      empty(x);
      int here = 0;  // the stage that is worked on; the one before it is being filled
#pragma unroll 1
      for (int i = 0; i < steps; i++) {
        const int filled = here ? here - 1 : STAGES - 1;
        stage(staged[warp][filled], from, mine, begin + 16 * (i + STAGES - 1), end);
        commit();
        landed<STAGES - 1>();
        Words w[2];
        bool keep[2];
#pragma unroll
        for (int k = 0; k < 2; k++) {
          const Staged& words = staged[warp][here];
          w[k].codes = words[k][0][lane];
          w[k].residuals = words[k][1][lane];
          w[k].values = words[k][2][lane];
          w[k].key_scales = words[k][3][lane].x;
          w[k].value_scales = words[k][3][lane].y;
          const int token = begin + 16 * i + t + 8 * k;
          keep[k] = token < end;
          if (first != last) keep[k] = keep[k] && parts[mine[token] / PER] == p;
        }
        if (first == last || __any_sync(EVERYTHING, keep[0] || keep[1]))
          step(x, w, keep, (const char*)table, b_q, b_r, offset, scale, c);
        here = here + 1 == STAGES ? 0 : here + 1;
      }
      landed<0>();
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int head = 2 * c + i;
        const float sum = over_tokens(x.sum[i]);
        float e_[4];
#pragma unroll
        for (int j = 0; j < 4; j++) e_[j] = over_tokens(x.weights[j][i]);
        if (head >= GROUP) continue;
        // the bias is the same for all keys of the part: it moves the maximum and nothing else
        float m = x.top[i] > NOTHING ? x.top[i] + bias[at * GROUP + head] * scale : MASKED;
        m = sum == sum ? m : 0.0f;
        const float best = fmaxf(top[i], m), old = exp2_(top[i] - best), fresh = m > NOTHING ? exp2_(m - best) : 0.0f;
#pragma unroll
        for (int k = 0; k < 8; k++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            // row t of the tile of plane k / 2 and byte parity k % 2; rows t + 8 are of the second word
            const int channel = 32 * (k / 2) + 8 * (t / 2) + 2 * (t & 1) + (k & 1) + 4 * e;
            float own = (4.0f * x.acc[k][2 * e + i] - 5.5f * e_[k / 2]) * bf16(value_scale + at * 128 + channel);
            own = fresh == 0.0f ? 0.0f : (own + sum * bf16(value_mean + at * 128 + channel)) * fresh;
            float& to = kept.out[warp][head][channel];
            to = own + to * old;
          }
        den[i] = den[i] * old + sum * fresh;
        top[i] = best;
      }
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (t == 0 && 2 * c + i < GROUP) {
        kept.den[warp][2 * c + i] = den[i];
        kept.top[warp][2 * c + i] = top[i];
      }
  }
  __syncthreads();
  // the warps' into one; its output is left times its denominator
  for (int i = threadIdx.x; i < GROUP * 128; i += 32 * WARPS) {
    const int head = i / 128, channel = i % 128;
    const size_t to = ((size_t)row * GROUP + head) * S + split;
    float best = MASKED, sum = 0.0f, d = 0.0f;
#pragma unroll
    for (int k = 0; k < WARPS; k++) best = fmaxf(best, kept.top[k][head]);
#pragma unroll
    for (int k = 0; k < WARPS; k++) {
      if (!(kept.top[k][head] > NOTHING)) continue;
      const float w = exp2_(kept.top[k][head] - best);
      sum = fmaf(w, kept.out[k][head][channel], sum);
      d = fmaf(w, kept.den[k][head], d);
    }
    part[to * 128 + channel] = sum;
    if (channel == 0) part_den[to] = d;
    if (channel == 0) part_top[to] = best;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    arrived = atomicAdd(tally + (size_t)row * TALLY + DONE, 1);
    __threadfence();
  }
  __syncthreads();
  if (arrived != splits + WHOLES - 1) return;
  merge(part, part_top, part_den, out + (size_t)b * o_batch + (size_t)(h * GROUP) * o_head, lse, row, S, splits, WHOLES,
        o_head);
}
