// Scoring and attending self-indexed records; what is computed is what kernels/triton/selfindex_*.py compute.
//
// score:  a thread has a token, the table of the query lies in shared memory. The 16 entries of a group fill 16 banks,
//         so that the lanes of a warp, each with another code, do not get in each other's way.
// attend: a warp has a split, and nothing of a record ever moves between threads but values once. Lane 4 t + c has of
//         tokens t and t + 8 the groups 8 c .. 8 c + 7: contiguous bytes in every plane, and, because a product does not
//         mind the order of its inner dimension, exactly its share of the operand K [16 tokens, groups] of a matrix
//         instruction, against Q^T [groups, 8 heads]. Values become the operand V^T [16 channels, 16 tokens] by one
//         8 x 8 transposition of packed bytes a word: a 16-bit unit is two bytes of a token, and afterwards a register
//         has the same two bytes of two tokens, whose codes are unpacked in pairs. Scores [tokens, heads] turn round
//         the same way. Codes are put into a mantissa: 1 + code / 4, so (code - 1.5) = 4 x - 5.5.
//
// Letters as there: rows are KV heads of all sequences, N slots, P parts, GH query heads of a KV head, S splits.

typedef unsigned int u32;
typedef unsigned long long u64;

#ifndef RESIDENT
#define RESIDENT 12  // programs of `attend` on an SM: what registers a thread may have
#endif
#define MASKED (-1.2089258e24f)   // -(2 ** 80)
#define NOTHING (-1.0995116e12f)  // -(2 ** 40)

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
#endif

__device__ __forceinline__ float low_of(u32 x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float high_of(u32 x) { return __uint_as_float(x & 0xffff0000u); }
__device__ __forceinline__ float bf16(const unsigned short* p) { return __uint_as_float((u32)*p << 16); }

// ------------------------------------------------------------------------------------------------------------- score

// grid (slots / (256 ITERS), rows), 256 threads
extern "C" __global__ void __launch_bounds__(256) score(
    const u32* codes, const u32* live, const float* lut, const float* span, const int* part_of, const int* slots,
    const int* n_parts, unsigned short* keys, int* tally, int HKV, int P, int N, int TALLY, int PER,
    int ITERS) {
  __shared__ float table[G * 16];
  __shared__ int counts[128];
  const int t = threadIdx.x, row = blockIdx.y, b = row / HKV, h = row % HKV;
  const int used = slots[b], begin = blockIdx.x * 256 * ITERS;
  if (begin >= used) return;
  float low = __int_as_float(0x7f800000), high = -low;
  for (int p = 0; p < n_parts[b]; p++) {
    const float* s = span + ((size_t)(b * P + p) * HKV + h) * 2;
    low = fminf(low, s[0]);
    high = fmaxf(high, s[1]);
  }
  const float wide = high - low;
  const bool usable = wide > 1e-30f && wide < 1e30f;
  const float unit = usable ? 65023.0f / wide : 0.0f;
  low = usable ? low : 0.0f;
  if (t < 128) counts[t] = 0;
  int have = -1;
  for (int it = 0; it < ITERS; it++) {
    const int first = begin + it * 256;
    if (first >= used) break;
    const size_t at = (size_t)row * N + first + t;
#if G == 32
    const uint4 w4 = ((const uint4*)codes)[at];
    const u32 w[4] = {w4.x, w4.y, w4.z, w4.w};
#else
    const uint2 w2 = ((const uint2*)codes)[at];
    const u32 w[2] = {w2.x, w2.y};
#endif
    const u32 alive = (live[at >> 5] >> (at & 31)) & 1;
    const int p = part_of[b * (N / PER) + first / PER];
    if (p != have) {
      __syncthreads();
      const float* from = lut + ((size_t)(b * P + p) * HKV + h) * (G * 16);
      for (int i = t; i < G * 16; i += 256) table[i] = from[i];
      __syncthreads();
      have = p;
    }
    float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int k = 0; k < G / 8; k++) {
#pragma unroll
      for (int i = 0; i < 8; i++) {
        // byte offset of an entry of 4 bytes
        const u32 offset = (i ? w[k] >> (4 * i - 2) : w[k] << 2) & 60;
        const int group = 4 * k + i / 2 + (i & 1) * (G / 2);
        s[i & 3] += *(const float*)((const char*)table + offset + group * 64);
      }
    }
    const float far = fminf(fmaxf(((s[0] + s[1]) + (s[2] + s[3]) - low) * unit, 0.0f), 65023.0f);
    const int key = alive ? (int)far + 512 : 0;
    keys[at] = (unsigned short)key;
    if (alive) atomicAdd(&counts[key >> 9], 1);
  }
  __syncthreads();
  if (t > 0 && t < 128 && counts[t]) atomicAdd(tally + (size_t)row * TALLY + t, counts[t]);
}

// ------------------------------------------------------------------------------------------------------------ attend

#if G == 32

struct Words {  // of a token: its lane's 8 groups, and all scales
  uint2 codes, residuals, values;
  u32 key_scales, value_scales;
};

struct Planes {
  const char *codes, *residuals, *values;
  const u32 *key_scales, *value_scales;
};

__device__ __forceinline__ Words words_of(const Planes& from, size_t slot, bool real, int c) {
  Words w;
  w.codes = w.residuals = w.values = make_uint2(0, 0);
  w.key_scales = w.value_scales = 0;
  if (real) {
    w.codes = *(const uint2*)(from.codes + slot * 16 + (c & 1) * 8);
    w.residuals = *(const uint2*)(from.residuals + slot * 32 + c * 8);
    w.values = *(const uint2*)(from.values + slot * 32 + c * 8);
    w.key_scales = from.key_scales[slot];
    w.value_scales = from.value_scales[slot];
  }
  return w;
}

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
    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 4));
    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 8));
    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 16));
    m = fmaxf(m, x.top[i]);
    alpha[i] = exp2_(x.top[i] - m);
    x.top[i] = m;
    s[i] = keep[0] ? exp2_(s[i] - m) : 0.0f;
    s[2 + i] = keep[1] ? exp2_(s[2 + i] - m) : 0.0f;
  }
  if (__any_sync(0xffffffffu, alpha[0] != 1.0f || alpha[1] != 1.0f)) {
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
  float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int j = 0; j < 4; j++)
#pragma unroll
    for (int e = 0; e < 2; e++)
      mma(s, k[0][j][2 * e], k[1][j][2 * e], k[0][j][2 * e + 1], k[1][j][2 * e + 1], q[j][e][0], q[j][e][1]);
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
    const float k0 = __shfl_sync(0xffffffffu, own[0], (lane & 28) | j);
    const float k1 = __shfl_sync(0xffffffffu, own[1], (lane & 28) | j);
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
    const float g0 = __shfl_sync(0xffffffffu, own[2], (lane & 28) | j);
    const float g1 = __shfl_sync(0xffffffffu, own[3], (lane & 28) | j);
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
  x += __shfl_xor_sync(0xffffffffu, x, 4);
  x += __shfl_xor_sync(0xffffffffu, x, 8);
  return x + __shfl_xor_sync(0xffffffffu, x, 16);
}

// grid (S, rows), 32 threads; the last WHOLES splits are of whole tokens. scale is given as the bits of a float
extern "C" __global__ void __launch_bounds__(32, RESIDENT) attend(
    const unsigned short* q, const u32* turned, const u32* spread, const float* bias, const char* codes,
    const char* residuals, const char* values, const u32* key_scales, const u32* value_scales, const uint4* centroids,
    const unsigned short* value_scale, const unsigned short* value_mean, const int* part_of, const int* chosen,
    const int* n_chosen, const uint4* whole_keys, const uint4* whole_values, const int* n_exact,
    const long long* open_end, float* part, float* part_top, float* part_den, int scale_bits, int HKV, int P, int N,
    int MOST, int S, int WHOLES, int SPLIT, int E, int W, int q_batch, int q_head, int GH, int PER) {
  __shared__ uint4 table[256];  // 4 KB: centroids of the part, 8 bytes a group and code
  const int lane = threadIdx.x, t = lane >> 2, c = lane & 3;
  const int row = blockIdx.y, b = row / HKV, h = row % HKV, split = blockIdx.x;
  const float scale = __int_as_float(scale_bits);
  const int head[2] = {2 * c, 2 * c + 1};
  const bool real[2] = {2 * c < GH, 2 * c + 1 < GH};
  size_t out[2];
#pragma unroll
  for (int i = 0; i < 2; i++) out[i] = ((size_t)row * GH + head[i]) * S + split;
  State x;
  if (split >= S - WHOLES) {
    empty(x);
    const int end = (int)open_end[b], exact = n_exact[b];
    const int each = ((W + WHOLES - 1) / WHOLES + 15) / 16 * 16, begin = (split - (S - WHOLES)) * each;
    u32 b_q[8][2];
    const u32* p_q = (const u32*)(q + (size_t)b * q_batch + (size_t)(h * GH + t) * q_head) + c * 16;
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
      for (int e = 0; e < 2; e++) b_q[i][e] = t < GH ? p_q[2 * i + e] : 0;
    for (int i = begin; i < begin + each && i < end; i += 16) {
      bool keep[2];
#pragma unroll
      for (int n = 0; n < 2; n++) {
        const int at = i + t + 8 * n;
        keep[n] = at < exact || (at >= E && at < end);
      }
      whole_step(x, whole_keys, whole_values, (size_t)row * W + i + t, keep, b_q, scale, c);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float sum = over_tokens(x.sum[i]);
      if (!real[i]) continue;
      if (t == 0) part_den[out[i]] = sum;
      if (t == 0) part_top[out[i]] = sum == sum ? x.top[i] : 0.0f;
#pragma unroll
      for (int k = 0; k < 8; k++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int channel = 32 * (k / 2) + 8 * (t / 2) + 4 * (k & 1) + 2 * e + (t & 1);
          part[out[i] * 128 + channel] = x.acc[k][2 * e + i];
        }
    }
    return;
  }
  const int lo = split * SPLIT, hi = min(lo + SPLIT, n_chosen[row]);
  if (lo >= hi) {
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (t == 0 && real[i]) part_top[out[i]] = MASKED;
    return;
  }
  const int* mine = chosen + (size_t)row * MOST;
  const int* parts = part_of + b * (N / PER);
  const Planes from = {codes + (size_t)row * N * 16, residuals + (size_t)row * N * 32, values + (size_t)row * N * 32,
                       key_scales + (size_t)row * N, value_scales + (size_t)row * N};
  const int first = parts[mine[lo] / PER], last = parts[mine[hi - 1] / PER];
  float top[2] = {MASKED, MASKED}, den[2] = {0.0f, 0.0f};
  for (int p = first; p <= last; p++) {
    const size_t at = (size_t)(b * P + p) * HKV + h;
    __syncwarp();
    for (int i = lane; i < 256; i += 32) table[i] = centroids[at * 256 + i];
    __syncwarp();
    u32 b_q[4][2][2], b_r[4][2][2];
    float offset[4][2];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float total = 0.0f;
#pragma unroll
      for (int e = 0; e < 2; e++)
#pragma unroll
        for (int f = 0; f < 2; f++) {
          const size_t i = (at * GH + t) * 64 + j * 16 + 4 * c + 2 * e + f;
          b_q[j][e][f] = t < GH ? turned[i] : 0;
          b_r[j][e][f] = t < GH ? spread[i] : 0;
          total += low_of(b_r[j][e][f]) + high_of(b_r[j][e][f]);
        }
      total += __shfl_xor_sync(0xffffffffu, total, 1);
      total += __shfl_xor_sync(0xffffffffu, total, 2);
#pragma unroll
      for (int i = 0; i < 2; i++) offset[j][i] = 5.5f * __shfl_sync(0xffffffffu, total, 4 * (2 * c + i));
    }
    empty(x);
    int slot[2], later[2];
    Words w[2];
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const int i = lo + t + 8 * n;
      slot[n] = i < hi ? mine[i] : 0;
      later[n] = i + 16 < hi ? mine[i + 16] : 0;
      w[n] = words_of(from, slot[n], i < hi, c);
    }
    for (int i = lo; i < hi; i += 16) {
      // words of the next step and slots of the one behind it are on their way while a step is worked on
      Words next[2];
      int after[2];
      bool keep[2];
#pragma unroll
      for (int n = 0; n < 2; n++) {
        const int k = i + t + 8 * n;
        next[n] = words_of(from, later[n], k + 16 < hi, c);
        after[n] = k + 32 < hi ? mine[k + 32] : 0;
        keep[n] = k < hi;
        if (first != last) keep[n] = keep[n] && parts[slot[n] / PER] == p;
      }
      if (first == last || __any_sync(0xffffffffu, keep[0] || keep[1]))
        step(x, w, keep, (const char*)table, b_q, b_r, offset, scale, c);
#pragma unroll
      for (int n = 0; n < 2; n++) {
        slot[n] = later[n];
        later[n] = after[n];
        w[n] = next[n];
      }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float sum = over_tokens(x.sum[i]);
      float e_[4];
#pragma unroll
      for (int j = 0; j < 4; j++) e_[j] = over_tokens(x.weights[j][i]);
      if (!real[i]) continue;
      float m = x.top[i] > NOTHING ? x.top[i] + bias[at * GH + head[i]] * scale : MASKED;
      m = sum == sum ? m : 0.0f;
      const float best = fmaxf(top[i], m), old = exp2_(top[i] - best), fresh = m > NOTHING ? exp2_(m - best) : 0.0f;
#pragma unroll
      for (int k = 0; k < 8; k++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          // row t of the tile of plane k / 2 and byte parity k % 2; rows t + 8 are of the second word
          const int channel = 32 * (k / 2) + 8 * (t / 2) + 2 * (t & 1) + (k & 1) + 4 * e;
          float own = (4.0f * x.acc[k][2 * e + i] - 5.5f * e_[k / 2]) * bf16(value_scale + at * 128 + channel);
          own = (own + sum * bf16(value_mean + at * 128 + channel)) * fresh;
          float* to = part + out[i] * 128 + channel;
          *to = p == first ? own : own + *to * old;
        }
      den[i] = den[i] * old + sum * fresh;
      top[i] = best;
    }
  }
#pragma unroll
  for (int i = 0; i < 2; i++)
    if (t == 0 && real[i]) {
      part_den[out[i]] = den[i];
      part_top[out[i]] = top[i];
    }
}

#endif
