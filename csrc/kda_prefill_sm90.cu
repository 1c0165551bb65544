// archs: 90a
//
// Kimi Delta Attention over whole prompts: bfloat16 inputs, heads of 128, states in float32. The mathematics is in
// kda/reference.py; names are those of its chunk form.
//
// A thread block takes a sequence (or a segment of it) and a head, 16 tokens at a time:
//   four warps copy q, k, v, g of the chunks to come, each one of them, into a ring in shared memory;
//   four pairs of warps prepare a chunk each: gates, norms, L, (I + L)^-1, M, and q, k with their decays;
//   four warps hold S in registers, 32 of its rows each, and step from chunk to chunk. Rows of S do not meet, so a
//   step needs no word between warps, and values may be split over two blocks.
// S is read by the products as bfloat16, and so are the factors whose decays need its range; all else that is
// multiplied is float16, which rounds eight times finer, with S, V and U scaled by a power of two so that they fit.
//
// Long sequences are cut into segments that run side by side: kda_segments_* finds for each but the last what it does
// to any state, S -> S M + C, kda_combine applies that to one after the other, kda_prefill_* then runs them all.

#include "ptx.cuh"

namespace {

using ptx::u32;
using ptx::u64;

constexpr int kDim = 128;
constexpr int kChunk = 16;
constexpr int kHalf = kChunk / 2;
constexpr int kStages = 8;  // chunks in the ring
constexpr int kPairs = 4;
constexpr int kScanWarps = 4;
constexpr int kPrepareWarps = 2 * kPairs;
constexpr int kCopyWarps = 4;  // one on each quarter of the multiprocessor
constexpr int kThreads = 32 * (kScanWarps + kPrepareWarps + kCopyWarps);
// Of a thread, in all as many as an even share: with 16 warps, 128 each when the block starts.
template <int kTiles>
constexpr int kScanRegisters = kTiles == 2 ? 232 : 184;
template <int kTiles>
constexpr int kPrepareRegisters = kTiles == 2 ? 128 : 152;
constexpr int kCopyRegisters = 24;
static_assert(kScanRegisters<2> + 2 * kPrepareRegisters<2> + kCopyRegisters == 4 * 128, "");
static_assert(kScanRegisters<1> + 2 * kPrepareRegisters<1> + kCopyRegisters == 4 * 128, "");
// Bytes from row to row, so that eight rows lie in different banks.
constexpr int kRow = 2 * kDim + 16;
constexpr int kSmallRow = 2 * kChunk + 16;
constexpr int kTile = kChunk * kRow;
constexpr int kSmallTile = kChunk * kSmallRow;
constexpr int kSystemRow = kChunk + 4;  // floats
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kNormEpsilon = 1e-6f;
constexpr float kQueryScale = 0.08838834764831845f;  // 128^-1/2
// What a chunk decays by is undone by its columns, which bfloat16 can up to this power of two: always with the bounded
// gate, whose bound is 2^116. Where the softplus gate, which has no bound, decays by more, L and M are made of blocks of
// 8 tokens, in which, and only there, no token is taken to decay by more than 2^-24; rows begin at 2^96, so that neither
// they nor the columns leave the range.
constexpr float kMostAtOnce = 100.f;
constexpr float kMostDecay = 24.f;
constexpr float kBlockStart = kHalf * kMostDecay / 2;
// (I + L)^-1 beta and so U, at most 1 without V, are this much larger, and what U is multiplied with is smaller: a small
// beta would lose its bits in float16.
constexpr float kUpdateScale = 64.f;
// The scaled V - S k are kept between these.
constexpr float kMost = 32.f;  // then no sum of 16 products is above 65504
constexpr float kLeast = 1.f / 128;
constexpr int kMostExponent = 90;        // of the scale
constexpr int kMostStateExponent = 100;  // of S, scaled

// Every member is 8 bytes wide; kernels/kda_native.py packs them in this order.
struct Args {
  const char* q;
  const char* k;
  const char* v;
  const char* g;
  const unsigned short* beta;
  const float* A_log;
  const float* dt_bias;
  const void* cu_seqlens;
  char* out;
  char* initial_state;           // dense, or the pool if there are rows; null: zeros
  const void* rows;              // of the pool, one a sequence; null: dense
  const bool* has_initial_state; // one a sequence, with rows
  char* final_state;             // dense; null: not wanted
  char* checkpoint_state;        // dense; null: not wanted
  const void* checkpoint_offsets;
  float* ends;                   // [slots, heads, 128, 128] state at the end of each segment but the last of a sequence
  float* maps;                   // [slots, heads, 128, 128] M of each of them
  long long num_heads;
  long long num_sequences;
  long long bounds_are_64_bit;   // cu_seqlens and checkpoint_offsets
  long long rows_are_64_bit;
  long long num_rows;            // of the pool
  long long row_stride;          // of the pool, in elements
  long long states_are_bf16;
  long long token_stride[5];     // of q, k, v, g in bytes, of beta in elements
  long long head_stride[5];
  long long out_stride;          // from token to token, in bytes
  long long lower_bound;         // the bits of a float
  long long segment_tokens;      // a multiple of 16
  long long slots;               // at least what the tokens of all sequences are of segments, rounded down
};

struct alignas(16) Stage {
  char q[kTile];  // raw, then decayed from the chunk's start
  char k[kTile];  // the same
  char g[kTile];  // raw, then k decayed to the chunk's end, float16
  char v[kTile];  // raw, then the output
  char inverse[kSmallTile];
  char mix[kSmallTile];
  float decay[kDim];  // of the whole chunk
};

// What a pair of warps needs while it prepares a chunk.
template <bool kBounded>
struct alignas(16) Desk {
  char columns[kTile];                       // k grown back to the offset
  char rows[kBounded ? 16 : 3 * kTile];      // of the softplus gate: k, q of L and M's first columns; of the others
  float system[kChunk * kSystemRow];         // L
  float norms[2][kChunk];                    // reciprocal, of q and of k
};

// A sequence, or a segment of one.
struct Work {
  long long first_token;
  int tokens;
  int head;
  int sequence;    // -1: nothing to do
  int first_chunk; // of the sequence
  int is_last;     // of the sequence
  long long slot; // of ends and maps; of a last segment it is another's
};

template <bool kBounded>
struct Shared {
  Stage stages[kStages];
  Desk<kBounded> desks[kPairs];
  u64 copied[kStages], prepared[kStages], used[kStages];
  Work work;
};

// As kernels/kda_native.py has them.
static_assert(sizeof(Shared<true>) == 178992 && sizeof(Shared<false>) == 231152, "dynamic shared memory");

__device__ __forceinline__ long long read_index(const void* from, bool is_64_bit, long long at) {
  return is_64_bit ? static_cast<const long long*>(from)[at] : static_cast<const int*>(from)[at];
}

__device__ __forceinline__ float bf16_at(const unsigned short* from) {
  return ptx::low_bf16(*from);
}

// The first of the numbers of a sequence: one for every `tokens` of it, rounded down, and with `plus_one` one more. Some
// numbers stay unused, whatever the lengths, and nothing has to be counted.
__device__ __forceinline__ long long first_number(const Args& args, long long sequence, long long tokens,
                                                  bool plus_one) {
  return read_index(args.cu_seqlens, args.bounds_are_64_bit, sequence) / tokens + (plus_one ? sequence : 0);
}

// The last sequence whose first number is not after this one. By a whole warp, 32 sequences at a time.
__device__ __forceinline__ int find_sequence(const Args& args, long long number, long long tokens, bool plus_one,
                                             int lane) {
  long long low = 0, count = args.num_sequences;
  while (count > 1) {
    const long long step = (count + 31) / 32;
    const bool before =
        lane * step < count && first_number(args, low + lane * step, tokens, plus_one) <= number;
    const int last = __popc(ptx::warp_ballot(before)) - 1;
    low += last * step;
    count = count - last * step < step ? count - last * step : step;
  }
  return static_cast<int>(low);
}

// Of a block: a sequence; of those that are in segments, one of any (`plus_one`), or of all but the last ones.
__device__ __forceinline__ Work find_work(const Args& args, long long number, bool plus_one, int lane) {
  Work work;
  const long long tokens = args.segment_tokens;
  const int sequence = tokens ? find_sequence(args, number, tokens, plus_one, lane) : static_cast<int>(number);
  const long long begin = read_index(args.cu_seqlens, args.bounds_are_64_bit, sequence);
  const long long length = read_index(args.cu_seqlens, args.bounds_are_64_bit, sequence + 1) - begin;
  const long long segment = tokens ? number - first_number(args, sequence, tokens, plus_one) : 0;
  const long long at = segment * tokens;
  const long long left = length - at;
  work.sequence = segment == 0 || left > 0 ? sequence : -1;
  work.first_token = begin + at;
  work.first_chunk = static_cast<int>(at / kChunk);
  work.is_last = !tokens || left <= tokens;
  work.tokens = static_cast<int>(work.is_last ? left : tokens);
  work.slot = tokens ? first_number(args, sequence, tokens, false) + segment : 0;
  return work;
}

// Copies one tensor's part of the chunks of a piece of work into the ring. One warp. What is not wanted is not copied.
template <bool kBounded>
__device__ void copy_chunks(const Args& args, Shared<kBounded>& shared, const Work& work, int tensor, bool wanted,
                            int lane) {
  const int first = lane / 16, vector = 16 * (lane % 16);
  const long long stride = args.token_stride[tensor];
  const char* from = tensor == 0 ? args.q : tensor == 1 ? args.k : tensor == 2 ? args.v : args.g;
  from += (work.first_token + first) * stride + work.head * args.head_stride[tensor] + vector;
  // Where in a stage: see Stage.
  const int place = (tensor == 2 ? 3 : tensor == 3 ? 2 : tensor) * kTile + first * kRow + vector;
  for (int chunk = 0; chunk * kChunk < work.tokens; ++chunk) {
    Stage& stage = shared.stages[chunk % kStages];
    if (chunk >= kStages) ptx::wait(&shared.used[chunk % kStages], (chunk / kStages - 1) & 1);
    if (wanted) {
      char* const tile = stage.q + place;
      const int left = work.tokens - chunk * kChunk - first;
#pragma unroll
      for (int row = 0; row < kChunk; row += 2) {
        ptx::copy_async(tile + row * kRow, from, row < left);
        from = ptx::only_here(from + 2 * stride);  // one address at a time, of the few registers
      }
    }
    ptx::arrive_after_copies(&shared.copied[chunk % kStages]);
  }
}

// Where in a tile a lane finds its row of the four 8x8 matrices of a [16, 16] part: as the left factor of a product, as
// the right one with a row of the tile for each column, and as the right one with the tile's own columns.
__device__ __forceinline__ int left_part(int row_bytes, int lane) {
  return ptx::only_here(lane % 16 * row_bytes + 16 * (lane / 16));
}
__device__ __forceinline__ int right_part(int row_bytes, int lane) {
  return ptx::only_here((lane % 8 + 8 * (lane / 16)) * row_bytes + 16 * (lane / 8 % 2));
}

// Reciprocal norms of the rows of a tile, from the diagonal of its product with itself. One warp.
__device__ __forceinline__ void find_norms(const char* tile, float* norms, int lane) {
  const int part = left_part(kRow, lane);
  float first[4], second[4];
#pragma unroll
  for (int column = 0; column < kDim; column += 16) {
    u32 x[4];
    ptx::load_matrices(x, tile + part + 2 * column);
    ptx::mma_bf16(first, x, x[0], x[2], column == 0);
    ptx::mma_bf16(second, x, x[1], x[3], column == 0);
  }
  const int row = lane / 4;
  if (lane % 4 == row / 2) {
    norms[row] = ptx::reciprocal_root((row % 2 ? first[1] : first[0]) + kNormEpsilon);
    norms[row + 8] = ptx::reciprocal_root((row % 2 ? second[3] : second[2]) + kNormEpsilon);
  }
}

__device__ __forceinline__ u32& word(char* tile, int row, int column) {
  return *reinterpret_cast<u32*>(tile + row * kRow + 4 * column);
}

constexpr u32 kClosed = 0xff7fff7f;  // two raw logits of a gate that lets nothing decay, the least of bfloat16

// Gates of two channels, from raw logits to log2 of the decay.
struct Gate {
  float slope[2], bias[2], most;
};

template <bool kBounded>
__device__ __forceinline__ Gate make_gate(const Args& args, int head, int column) {
  Gate gate;
  const float rate = ptx::exp2(args.A_log[head] * kLog2E);
  for (int i = 0; i < 2; ++i) {
    const float bias = args.dt_bias[head * kDim + 2 * column + i];
    // Not quite 0 of any head, so that the gate can be closed.
    gate.slope[i] = kBounded ? fminf(-rate * kLog2E, -1e-36f) : kLog2E;
    gate.bias[i] = gate.slope[i] * bias;
  }
  gate.most = kBounded ? kLog2E * __int_as_float(static_cast<int>(args.lower_bound)) : -rate;
  return gate;
}

// Before it is multiplied by `most`: sigmoid(A x), or softplus(x) / ln 2.
template <bool kBounded>
__device__ __forceinline__ float open(const Gate& gate, int i, float raw) {
  const float exponent = fmaf(gate.slope[i], raw, gate.bias[i]);
  const float power = ptx::exp2(exponent);
  if (kBounded) return ptx::reciprocal(1.f + power);
  // log2(1 + power) loses the bits of a small power: the first terms of its series are nearer.
  const float series =
      power * fmaf(power, fmaf(power, fmaf(power, -0.25f * kLog2E, kLog2E / 3), -0.5f * kLog2E), kLog2E);
  const float logarithm = power < 1.f / 32 ? series : ptx::log2(1.f + power);
  return exponent > 64.f ? exponent : logarithm;  // the same to the last bit, where the power ends
}

// Log2 of the decay of two channels, token for token.
using Decays = float[kChunk][2];

template <bool kBounded>
__device__ __forceinline__ void read_decays(Decays& decays, Stage& stage, const Gate& gate, int column) {
  u32 raw[kChunk];
#pragma unroll
  for (int row = 0; row < kChunk; ++row) raw[row] = word(stage.g, row, column);
#pragma unroll
  for (int row = 0; row < kChunk; ++row) {
    decays[row][0] = gate.most * open<kBounded>(gate, 0, ptx::low_bf16(raw[row]));
    decays[row][1] = gate.most * open<kBounded>(gate, 1, ptx::high_bf16(raw[row]));
  }
}

// Reciprocal norms of four rows.
__device__ __forceinline__ void read_norms(float (&to)[4], const float* norms) {
  const float4 four = *reinterpret_cast<const float4*>(norms);
  to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}

// Decays of a chunk applied to two channels of q and k, in place: of a chunk whose whole decay bfloat16 can undo.
template <bool kBounded, bool kOutput>
__device__ __forceinline__ void decay_at_once(Stage& stage, Desk<kBounded>& desk, const Decays& decays,
                                              int column) {
  float grown[kChunk][2], sum[2] = {};
#pragma unroll
  for (int first = 0; first < kChunk; first += 4) {
    // Loads before stores, which the compiler keeps in their order.
    float key_norms[4], query_norms[4];
    u32 keys[4], queries[4];
    read_norms(key_norms, desk.norms[1] + first);
    if (kOutput) read_norms(query_norms, desk.norms[0] + first);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      keys[i] = word(stage.k, first + i, column);
      if (kOutput) queries[i] = word(stage.q, first + i, column);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first + i;
      sum[0] += decays[row][0];
      sum[1] += decays[row][1];
      const float decay[2] = {ptx::exp2(sum[0]), ptx::exp2(sum[1])};
      const float key[2] = {ptx::low_bf16(keys[i]) * key_norms[i], ptx::high_bf16(keys[i]) * key_norms[i]};
      word(stage.k, row, column) = ptx::pack_bf16(key[0] * decay[0], key[1] * decay[1]);
      grown[row][0] = key[0] * ptx::exp2(-sum[0]);
      grown[row][1] = key[1] * ptx::exp2(-sum[1]);
      word(desk.columns, row, column) = ptx::pack_bf16(grown[row][0], grown[row][1]);
      if (kOutput) {
        word(stage.q, row, column) = ptx::pack_bf16(ptx::low_bf16(queries[i]) * query_norms[i] * decay[0],
                                                    ptx::high_bf16(queries[i]) * query_norms[i] * decay[1]);
      }
    }
  }
  float total[2] = {ptx::exp2(sum[0]), ptx::exp2(sum[1])};
  *reinterpret_cast<float2*>(stage.decay + 2 * column) = make_float2(total[0], total[1]);
  total[0] /= kUpdateScale, total[1] /= kUpdateScale;
#pragma unroll
  for (int row = 0; row < kChunk; ++row) {
    word(stage.g, row, column) = ptx::pack_f16(grown[row][0] * total[0], grown[row][1] * total[1]);
  }
}

// Both in short loops, with the sums of decays in shared memory between them: the code of all roles has to fit the
// instruction cache, about 32 KB, which with the softplus gate it does not otherwise.
__device__ __forceinline__ void find_sums(float (&total)[2], Stage& stage, Desk<false>& desk, const Gate& gate,
                                          int column) {
  total[0] = total[1] = 0.f;
#pragma unroll 1
  for (int first = 0; first < kChunk; first += 4) {
    u32 raw[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) raw[i] = word(stage.g, first + i, column);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      total[0] = fmaf(gate.most, open<false>(gate, 0, ptx::low_bf16(raw[i])), total[0]);
      total[1] = fmaf(gate.most, open<false>(gate, 1, ptx::high_bf16(raw[i])), total[1]);
      word(desk.columns, first + i, column) = __float_as_uint(total[0]);
      word(desk.rows, first + i, column) = __float_as_uint(total[1]);
    }
  }
}

template <bool kOutput>
__device__ __forceinline__ void decay_by_sums(Stage& stage, Desk<false>& desk, const float (&total)[2], int column) {
  const float whole[2] = {ptx::exp2(total[0]), ptx::exp2(total[1])};
  *reinterpret_cast<float2*>(stage.decay + 2 * column) = make_float2(whole[0], whole[1]);
  const float to_end[2] = {whole[0] / kUpdateScale, whole[1] / kUpdateScale};
#pragma unroll 1
  for (int first = 0; first < kChunk; first += 4) {
    float key_norms[4], query_norms[4], sums[4][2];
    u32 keys[4], queries[4];
    read_norms(key_norms, desk.norms[1] + first);
    if (kOutput) read_norms(query_norms, desk.norms[0] + first);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[i][0] = __uint_as_float(word(desk.columns, first + i, column));
      sums[i][1] = __uint_as_float(word(desk.rows, first + i, column));
      keys[i] = word(stage.k, first + i, column);
      if (kOutput) queries[i] = word(stage.q, first + i, column);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first + i;
      const float decay[2] = {ptx::exp2(sums[i][0]), ptx::exp2(sums[i][1])};
      const float key[2] = {ptx::low_bf16(keys[i]) * key_norms[i], ptx::high_bf16(keys[i]) * key_norms[i]};
      const float grown[2] = {key[0] * ptx::exp2(-sums[i][0]), key[1] * ptx::exp2(-sums[i][1])};
      word(stage.k, row, column) = ptx::pack_bf16(key[0] * decay[0], key[1] * decay[1]);
      word(desk.columns, row, column) = ptx::pack_bf16(grown[0], grown[1]);
      word(stage.g, row, column) = ptx::pack_f16(grown[0] * to_end[0], grown[1] * to_end[1]);
      if (kOutput) {
        word(stage.q, row, column) = ptx::pack_bf16(ptx::low_bf16(queries[i]) * query_norms[i] * decay[0],
                                                    ptx::high_bf16(queries[i]) * query_norms[i] * decay[1]);
      }
    }
  }
}

// What decay_at_once does, of a chunk that may decay by anything.
template <bool kOutput>
__device__ __forceinline__ void decay_by_blocks(Stage& stage, Desk<false>& desk, const Decays& decays, int column) {
  char* const first_keys = desk.rows;
  char* const first_queries = desk.rows + kTile;
  char* const second = desk.rows + 2 * kTile;
  float to_end[2] = {}, key_norms[4], query_norms[4];
#pragma unroll
  for (int row = kChunk - 1; row >= 0; --row) {
    if (row % 4 == 3) read_norms(key_norms, desk.norms[1] + row - 3);
    const u32 k = word(stage.k, row, column);
    const float norm = key_norms[row % 4] * (1.f / kUpdateScale);
    word(stage.g, row, column) = ptx::pack_f16(ptx::low_bf16(k) * norm * ptx::exp2(to_end[0]),
                                               ptx::high_bf16(k) * norm * ptx::exp2(to_end[1]));
    to_end[0] += decays[row][0];
    to_end[1] += decays[row][1];
  }
  *reinterpret_cast<float2*>(stage.decay + 2 * column) = make_float2(ptx::exp2(to_end[0]), ptx::exp2(to_end[1]));
  float before[2] = {};                             // from the chunk's start to the block's
  float last_block[2] = {kBlockStart, kBlockStart};  // limited, to the end of the first block
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    float exact[2] = {}, limited[2] = {kBlockStart, kBlockStart};
#pragma unroll
    for (int row = block * kHalf; row < (block + 1) * kHalf; ++row) {
      const u32 k = word(stage.k, row, column), q = kOutput ? word(stage.q, row, column) : 0;
      if (row % 4 == 0) read_norms(key_norms, desk.norms[1] + row);
      if (row % 4 == 0 && kOutput) read_norms(query_norms, desk.norms[0] + row);
      const float key_norm = key_norms[row % 4], query_norm = kOutput ? query_norms[row % 4] : 0.f;
      float key[2] = {ptx::low_bf16(k) * key_norm, ptx::high_bf16(k) * key_norm};
      float query[2] = {ptx::low_bf16(q) * query_norm, ptx::high_bf16(q) * query_norm};
      float decay[2], near[2], far[2], back[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        exact[i] += decays[row][i];
        limited[i] += fmaxf(decays[row][i], -kMostDecay);
        decay[i] = ptx::exp2(before[i] + exact[i]);
        near[i] = ptx::exp2(limited[i]);
        far[i] = block ? ptx::exp2(last_block[i] + exact[i]) : near[i];
        back[i] = ptx::exp2(-limited[i]);
      }
      word(stage.k, row, column) = ptx::pack_bf16(key[0] * decay[0], key[1] * decay[1]);
      word(desk.columns, row, column) = ptx::pack_bf16(key[0] * back[0], key[1] * back[1]);
      word(first_keys, row, column) = ptx::pack_bf16(key[0] * far[0], key[1] * far[1]);
      if (block) word(second, row - kHalf, column) = ptx::pack_bf16(key[0] * near[0], key[1] * near[1]);
      if (kOutput) {
        word(stage.q, row, column) = ptx::pack_bf16(query[0] * decay[0], query[1] * decay[1]);
        word(first_queries, row, column) = ptx::pack_bf16(query[0] * far[0], query[1] * far[1]);
        if (block) word(second, row, column) = ptx::pack_bf16(query[0] * near[0], query[1] * near[1]);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      before[i] += exact[i];
      last_block[i] = limited[i];
    }
  }
}

// Products [16, 16] of the rows of L, or of M, with the columns, in two halves of 8 columns. The right half may have
// rows of its own, 8 of L and 8 of M. One warp.
template <bool kSameRows>
__device__ __forceinline__ void multiply(float (&left)[4], float (&right)[4], const char* rows, const char* right_rows,
                                         const char* columns, int lane) {
  const int row = left_part(kRow, lane), token = right_part(kRow, lane);
#pragma unroll
  for (int column = 0; column < kDim; column += 16) {
    u32 a[4], c[4], b[4];
    ptx::load_matrices(a, rows + row + 2 * column);
    if (!kSameRows) ptx::load_matrices(c, right_rows + row + 2 * column);
    ptx::load_matrices(b, columns + token + 2 * column);
    ptx::mma_bf16(left, a, b[0], b[1], column == 0);
    ptx::mma_bf16(right, kSameRows ? a : c, b[2], b[3], column == 0);
  }
}

__device__ __forceinline__ unsigned short f16_bits(float x) {
  return static_cast<unsigned short>(ptx::pack_f16(x, 0.f));
}

// (I + L)^-1 beta, from L beside its diagonal, A and B on it and C below, in blocks of 8: A^-1 and B^-1 by substitution, a
// column a lane, then -B^-1 C A^-1, a column of two rows a lane. One warp; `beta` is of token lane % 16.
__device__ __forceinline__ void invert(float* system, char* to, float beta, int lane) {
  const int block = lane / 8 % 2, column = lane % 8, rows = 2 * (lane / 8);
  const float* const diagonal = system + block * (kHalf * kSystemRow + kHalf);
  float x[kHalf];
#pragma unroll
  for (int row = 0; row < kHalf; ++row) {
    float sums[2] = {row == column ? -1.f : 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < row; ++i) sums[i % 2] = fmaf(diagonal[row * kSystemRow + i], x[i], sums[i % 2]);
    x[row] = -(sums[0] + sums[1]);
  }
  // B^-1 to where nothing is.
  float* const beside = system + kHalf;
  if (lane / 8 == 1) {
#pragma unroll
    for (int row = 0; row < kHalf; ++row) beside[row * kSystemRow + column] = x[row];
  }
  // The third eight lanes make the zeros above B.
  const bool is_above = lane / 8 == 2;
  const float factor = is_above ? 0.f : beta * kUpdateScale;
  char* const at = to + (is_above ? 0 : block * kHalf) * kSmallRow + 2 * ((is_above ? 1 : block) * kHalf + column);
#pragma unroll
  for (int row = 0; row < kHalf; ++row) {
    *reinterpret_cast<unsigned short*>(at + row * kSmallRow) = f16_bits(x[row] * factor);
  }
  float products[2] = {};
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float a = ptx::warp_read(x[i], column);
    products[0] = fmaf(system[(kHalf + rows) * kSystemRow + i], a, products[0]);
    products[1] = fmaf(system[(kHalf + rows + 1) * kSystemRow + i], a, products[1]);
  }
  ptx::warp_sync();
  const float column_factor = ptx::warp_read(beta, column) * -kUpdateScale;
  float below[2] = {};
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float product = ptx::warp_read(products[i % 2], i / 2 * 8 + column);
    below[0] = fmaf(beside[rows * kSystemRow + i], product, below[0]);
    below[1] = fmaf(beside[(rows + 1) * kSystemRow + i], product, below[1]);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    *reinterpret_cast<unsigned short*>(to + (kHalf + rows + i) * kSmallRow + 2 * column) =
        f16_bits(below[i] * column_factor);
  }
}

// L beside its diagonal, from the products of keys, and its inverse. One warp; token n's learning rate is in lane n.
template <bool kBounded>
__device__ __forceinline__ void solve(Stage& stage, Desk<kBounded>& desk, const float (&left)[4],
                                      const float (&right)[4], float beta, int lane) {
  const int row = lane / 4, column = 2 * (lane % 4);
  const float upper = ptx::warp_read(beta, row), lower = ptx::warp_read(beta, row + 8);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float* const at = desk.system + row * kSystemRow + column + i;
    at[0] = column + i < row ? left[i] * upper : 0.f;
    at[8 * kSystemRow] = left[2 + i] * lower;
    at[8 * kSystemRow + 8] = column + i < row ? right[2 + i] * lower : 0.f;
  }
  ptx::warp_sync();
  invert(desk.system, stage.inverse, beta, lane);
}

// M, from the products of queries and keys. One warp.
__device__ __forceinline__ void mix(Stage& stage, float (&left)[4], float (&right)[4], int lane) {
  const int row = lane / 4, column = 2 * (lane % 4);
  const bool first = column <= row, second = column + 1 <= row;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    left[i] *= 1.f / kUpdateScale;
    right[i] *= 1.f / kUpdateScale;
  }
  char* const at = stage.mix + row * kSmallRow + 2 * column;
  *reinterpret_cast<u32*>(at) = ptx::pack_f16(first ? left[0] : 0.f, second ? left[1] : 0.f);
  *reinterpret_cast<u32*>(at + 16) = 0;
  *reinterpret_cast<u32*>(at + 8 * kSmallRow) = ptx::pack_f16(left[2], left[3]);
  *reinterpret_cast<u32*>(at + 8 * kSmallRow + 16) =
      ptx::pack_f16(first ? right[2] : 0.f, second ? right[3] : 0.f);
}

// Makes every fourth chunk ready for the scan. A pair of warps; with kShort, in short loops.
template <bool kBounded, bool kOutput, bool kShort>
__device__ void prepare_chunks(const Args& args, Shared<kBounded>& shared, const Work& work, int pair, int thread) {
  Desk<kBounded>& desk = shared.desks[pair];
  const int lane = thread % 32;
  // A pair's warps have different work, which falls on each quarter of the multiprocessor once.
  const bool first_warp = (thread < 32) == (pair < kPairs / 2);
  const Gate gate = make_gate<kBounded>(args, work.head, thread);
  const unsigned short* const betas = args.beta + work.head * args.head_stride[4] + work.first_token * args.token_stride[4];
  const auto read_beta = [&](int chunk) {
    const int token = chunk * kChunk + lane % kChunk;
    return token < work.tokens ? bf16_at(betas + token * args.token_stride[4]) : 0.f;
  };
  float raw_beta = read_beta(pair);
  for (int chunk = pair; chunk * kChunk < work.tokens; chunk += kPairs) {
    Stage& stage = shared.stages[chunk % kStages];
    const float beta = ptx::reciprocal(1.f + ptx::exp2(-raw_beta * kLog2E));
    raw_beta = read_beta(chunk + kPairs);
    ptx::wait(&shared.copied[chunk % kStages], (chunk / kStages) & 1);
    if (kOutput || !first_warp) find_norms(first_warp ? stage.q : stage.k, desk.norms[first_warp ? 0 : 1], lane);
    ptx::barrier(1 + pair, 64);
    for (int row = work.tokens - chunk * kChunk; row < kChunk; ++row) word(stage.g, row, thread) = kClosed;
    bool at_once = true;
    if constexpr (kShort) {
      float total[2];
      find_sums(total, stage, desk, gate, thread);
      at_once = ptx::barrier_all(1 + pair, 64, fminf(total[0], total[1]) > -kMostAtOnce);
      if (at_once) decay_by_sums<kOutput>(stage, desk, total, thread);
    }
    if (!kShort || !at_once) {
      Decays decays;
      read_decays<kBounded>(decays, stage, gate, thread);
      if constexpr (!kBounded && !kShort) {
        float total[2] = {};
#pragma unroll
        for (int row = 0; row < kChunk; ++row) {
          total[0] += decays[row][0];
          total[1] += decays[row][1];
        }
        at_once = ptx::barrier_all(1 + pair, 64, fminf(total[0], total[1]) > -kMostAtOnce);
      }
      if constexpr (!kBounded) {
        if (!at_once) decay_by_blocks<kOutput>(stage, desk, decays, thread);
      }
      if constexpr (!kShort) {
        if (at_once) decay_at_once<kBounded, kOutput>(stage, desk, decays, thread);
      }
    }
    ptx::barrier(1 + pair, 64);
    // By the same code in both warps, again for the instruction cache.
    if (kOutput || first_warp) {
      float left[4], right[4];
      const char* rows = first_warp ? stage.k : stage.q;
      const char* right_rows = rows;
      if constexpr (!kBounded) {
        if (!at_once) rows = desk.rows + (first_warp ? 0 : kTile), right_rows = desk.rows + 2 * kTile;
      }
      multiply<kBounded>(left, right, rows, right_rows, desk.columns, lane);
      if (first_warp) {
        if (!at_once) right[2] = right[0], right[3] = right[1];
        solve(stage, desk, left, right, beta, lane);
      } else {
        mix(stage, left, right, lane);
      }
    }
    ptx::arrive_as_warp(&shared.prepared[chunk % kStages], lane);
  }
}

// Rows of S as a warp holds them: [tiles of 16 rows][tiles of 8 columns][see ptx::mma_bf16].
template <int kTiles>
using State = float[kTiles][kDim / 8][4];

__device__ __forceinline__ int row_bytes(bool is_bf16) { return (is_bf16 ? 2 : 4) * kDim; }

// The first of a lane's elements; the others are at fixed distances.
__device__ __forceinline__ int first_element(int lane) { return lane / 4 * kDim + 2 * (lane % 4); }

// `at` is the first of the warp's rows.
template <int kTiles>
__device__ __forceinline__ void read_state(State<kTiles>& state, const char* at, bool is_bf16, int lane) {
  const u32* const pairs = reinterpret_cast<const u32*>(at + 2 * first_element(lane));
  const float2* const wide_pairs = reinterpret_cast<const float2*>(at + 4 * first_element(lane));
  if (is_bf16) {
#pragma unroll
    for (int i = 0; i < kTiles * kDim / 4; ++i) {
      const u32 pair = pairs[8 * (i / 16) * kDim / 2 + 4 * (i % 16)];
      state[i / 32][i % 16][i / 16 % 2 * 2] = ptx::low_bf16(pair);
      state[i / 32][i % 16][i / 16 % 2 * 2 + 1] = ptx::high_bf16(pair);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kTiles * kDim / 4; ++i) {
      const float2 pair = wide_pairs[8 * (i / 16) * kDim / 2 + 4 * (i % 16)];
      state[i / 32][i % 16][i / 16 % 2 * 2] = pair.x;
      state[i / 32][i % 16][i / 16 % 2 * 2 + 1] = pair.y;
    }
  }
}

template <int kTiles>
__device__ __forceinline__ void write_state(const State<kTiles>& state, float scale, char* at, bool is_bf16,
                                            int lane) {
  at = ptx::only_here(at);
  u32* const pairs = reinterpret_cast<u32*>(at + 2 * first_element(lane));
  float2* const wide_pairs = reinterpret_cast<float2*>(at + 4 * first_element(lane));
  if (is_bf16) {
#pragma unroll
    for (int i = 0; i < kTiles * kDim / 4; ++i) {
      const float(&four)[4] = state[i / 32][i % 16];
      const int half = i / 16 % 2 * 2;
      pairs[8 * (i / 16) * kDim / 2 + 4 * (i % 16)] = ptx::pack_bf16(four[half] * scale, four[half + 1] * scale);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kTiles * kDim / 4; ++i) {
      const float(&four)[4] = state[i / 32][i % 16];
      const int half = i / 16 % 2 * 2;
      wide_pairs[8 * (i / 16) * kDim / 2 + 4 * (i % 16)] = make_float2(four[half] * scale, four[half + 1] * scale);
    }
  }
}

// x and y as pairs of bfloat16, and what that leaves of them.
__device__ __forceinline__ void split(float x, float y, u32& high, u32& low) {
  high = ptx::pack_bf16(x, y);
  low = ptx::pack_bf16(x - ptx::low_bf16(high), y - ptx::high_bf16(high));
}

// M, for kda_combine, which multiplies by it from the right: [tiles of 8 columns][steps of 16 rows][lanes] of what a lane
// needs for a product, as two pairs of bfloat16 and two pairs of what that leaves.
template <int kTiles>
__device__ __forceinline__ void write_map(const State<kTiles>& state, float scale, char* to, int first_row, int lane) {
  uint4* const at = ptx::only_here(reinterpret_cast<uint4*>(to) + first_row / 16 * 32 + lane);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) {
      const float(&four)[4] = state[tile][i];
      u32 high[2], low[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        split(four[2 * half] * scale, four[2 * half + 1] * scale, high[half], low[half]);
        high[half] = ptx::transpose(high[half]);
        low[half] = ptx::transpose(low[half]);
      }
      at[(i * (kDim / 16) + tile) * 32] = uint4{high[0], high[1], low[0], low[1]};
    }
  }
}

__device__ __forceinline__ int exponent_of(float x) { return static_cast<int>(__float_as_uint(x) >> 23 & 0xff) - 127; }

// The power of two that brings x near 1, of a finite x above 0: within what the scale may become, and no more than the
// largest of S bears. Beside a larger S, what x loses by that is nothing.
__device__ __forceinline__ float rescale(float x, float scale, float largest_state) {
  const int most = min(kMostExponent - exponent_of(scale), kMostStateExponent - exponent_of(largest_state));
  const int exponent = min(max(-exponent_of(x), -kMostExponent - exponent_of(scale)), most);
  return __uint_as_float(static_cast<u32>(127 + max(exponent, -126)) << 23);
}

// Where a scan begins and ends.
struct Ends {
  const char* from;  // null: zeros
  bool from_identity, from_is_bf16;
  char* to[2];       // null: not wanted
  bool to_is_bf16[2];
  char* checkpoint;
  int checkpoint_chunk;  // after which it is taken, counted in the piece of work; -1: not here
};

// Steps from chunk to chunk. A warp with the rows from `first_row` on, 16 or 32 of them.
template <bool kBounded, int kTiles, bool kOutput>
__device__ void scan_chunks(const Args& args, Shared<kBounded>& shared, const Work& work, int first_row,
                            const Ends& ends, int lane) {
  State<kTiles> state;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = first_row + 16 * tile + lane / 4 + 8 * (j / 2), column = 8 * i + 2 * (lane % 4) + j % 2;
        state[tile][i][j] = ends.from_identity && row == column ? 1.f : 0.f;
      }
    }
  }
  if (ends.from) {
    read_state<kTiles>(state, ends.from + first_row * row_bytes(ends.from_is_bf16), ends.from_is_bf16, lane);
  }
  float scale = 1.f;  // of `state`, and of all that is linear in it
  const int part = right_part(kRow, lane), small_part = right_part(kSmallRow, lane);
  const int update_part = left_part(kRow, lane), decay_part = ptx::only_here(2 * (lane % 4));
  const int value_part = part + 2 * first_row;
  const int chunks = (work.tokens + kChunk - 1) / kChunk;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    Stage& stage = shared.stages[chunk % kStages];
    ptx::wait(&shared.prepared[chunk % kStages], (chunk / kStages) & 1);

    // S k and S q, from the chunk's start. [tiles of rows][tiles of 8 tokens]
    float read[kTiles][2][4], output[kTiles][2][4];
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      u32 k[4], q[4];
      ptx::load_matrices(k, stage.k + part + 32 * i);
      if (kOutput) ptx::load_matrices(q, stage.q + part + 32 * i);
      const float2 decay[2] = {*reinterpret_cast<const float2*>(stage.decay + decay_part + 16 * i),
                               *reinterpret_cast<const float2*>(stage.decay + decay_part + 16 * i + 8)};
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        float(&left)[4] = state[tile][2 * i];
        float(&right)[4] = state[tile][2 * i + 1];
        const u32 s[4] = {ptx::pack_bf16(left[0], left[1]), ptx::pack_bf16(left[2], left[3]),
                          ptx::pack_bf16(right[0], right[1]), ptx::pack_bf16(right[2], right[3])};
        ptx::mma_bf16(read[tile][0], s, k[0], k[1], i == 0);
        ptx::mma_bf16(read[tile][1], s, k[2], k[3], i == 0);
        if (kOutput) {
          ptx::mma_bf16(output[tile][0], s, q[0], q[1], i == 0);
          ptx::mma_bf16(output[tile][1], s, q[2], q[3], i == 0);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          left[j] *= j % 2 ? decay[0].y : decay[0].x;
          right[j] *= j % 2 ? decay[1].y : decay[1].x;
        }
      }
    }

    // V - S k, scaled.
    float largest = 0.f;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      u32 v[4];
      ptx::load_transposed(v, stage.v + value_part + 32 * tile);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const u32 pair = v[2 * half + j / 2];
          const float value = !kOutput && ends.from_identity ? 0.f : j % 2 ? ptx::high_bf16(pair) : ptx::low_bf16(pair);
          float& x = read[tile][half][j];
          x = fmaf(value, scale, -x);
          largest = fmaxf(largest, fabsf(x));
        }
      }
    }
    largest = __uint_as_float(ptx::warp_max(__float_as_uint(largest)));
    if ((largest > kMost && largest < 0x1p120f) || (largest < kLeast && largest > 0x1p-120f)) {
      float largest_state = 0.f;
#pragma unroll
      for (int i = 0; i < kTiles * kDim / 2; ++i) {
        largest_state = fmaxf(largest_state, fabsf(state[i / 64][i / 4 % 16][i % 4]));
      }
      largest_state = __uint_as_float(ptx::warp_max(__float_as_uint(largest_state)));
      const float change = rescale(largest, scale, largest_state);
      scale *= change;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
          for (int i = 0; i < kDim / 8; ++i) state[tile][i][j] *= change;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            read[tile][half][j] *= change;
            output[tile][half][j] *= change;
          }
        }
      }
    }

    // U, then its part of the output.
    u32 inverse[4], mixes[4], updates[kTiles][4];
    ptx::load_matrices(inverse, stage.inverse + small_part);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      float u[2][4];
      const float(&r)[2][4] = read[tile];
      const u32 a[4] = {ptx::pack_f16(r[0][0], r[0][1]), ptx::pack_f16(r[0][2], r[0][3]),
                        ptx::pack_f16(r[1][0], r[1][1]), ptx::pack_f16(r[1][2], r[1][3])};
      ptx::mma_f16(u[0], a, inverse[0], inverse[1], true);
      ptx::mma_f16(u[1], a, inverse[2], inverse[3], true);
      updates[tile][0] = ptx::pack_f16(u[0][0], u[0][1]);
      updates[tile][1] = ptx::pack_f16(u[0][2], u[0][3]);
      updates[tile][2] = ptx::pack_f16(u[1][0], u[1][1]);
      updates[tile][3] = ptx::pack_f16(u[1][2], u[1][3]);
    }

    // The state at the chunk's end.
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      u32 k[4];
      ptx::load_transposed(k, stage.g + update_part + 32 * i);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        ptx::mma_f16(state[tile][2 * i], updates[tile], k[0], k[1]);
        ptx::mma_f16(state[tile][2 * i + 1], updates[tile], k[2], k[3]);
      }
    }

    if (kOutput) {
      ptx::load_matrices(mixes, stage.mix + small_part);
      const float final_scale = kQueryScale * __uint_as_float((254u << 23) - __float_as_uint(scale));
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        u32 packed[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float(&o)[4] = output[tile][half];
          ptx::mma_f16(o, updates[tile], mixes[2 * half], mixes[2 * half + 1]);
          packed[2 * half] = ptx::pack_bf16(o[0] * final_scale, o[1] * final_scale);
          packed[2 * half + 1] = ptx::pack_bf16(o[2] * final_scale, o[3] * final_scale);
        }
        // These values of v have been read by this warp, and by no other.
        ptx::store_transposed(stage.v + value_part + 32 * tile, packed);
      }
      ptx::warp_sync();
      constexpr int kVectors = 2 * kTiles;  // of 16 bytes a token
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const int row = i * (32 / kVectors) + lane / kVectors, vector = lane % kVectors;
        const int token = chunk * kChunk + row;
        const uint4 values = *reinterpret_cast<const uint4*>(stage.v + row * kRow + 2 * first_row + 16 * vector);
        if (token < work.tokens) {
          *reinterpret_cast<uint4*>(args.out + (work.first_token + token) * args.out_stride +
                                    2 * (work.head * kDim + first_row) + 16 * vector) = values;
        }
      }
    }
    ptx::arrive_as_warp(&shared.used[chunk % kStages], lane);
    if (chunk == ends.checkpoint_chunk) {
      const bool is_bf16 = args.states_are_bf16;
      write_state<kTiles>(state, 1.f / scale, ends.checkpoint + first_row * row_bytes(is_bf16), is_bf16, lane);
    }
  }
  if (!kOutput && ends.from_identity) {
    write_map<kTiles>(state, 1.f / scale, ends.to[0], first_row, lane);
    return;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (ends.to[i]) {
      write_state<kTiles>(state, 1.f / scale, ends.to[i] + first_row * row_bytes(ends.to_is_bf16[i]),
                          ends.to_is_bf16[i], lane);
    }
  }
}

// Where the states of a sequence are, read from the pool, written there and apart.
__device__ __forceinline__ Ends ends_of_sequence(const Args& args, const Work& work) {
  Ends ends = {};
  const bool is_bf16 = args.states_are_bf16;
  const long long state_bytes = (is_bf16 ? 2 : 4) * kDim * kDim;
  const long long dense = (work.sequence * args.num_heads + work.head) * state_bytes;
  ends.from_is_bf16 = ends.to_is_bf16[0] = ends.to_is_bf16[1] = is_bf16;
  ends.checkpoint_chunk = -1;
  if (args.final_state) ends.to[0] = args.final_state + dense;
  if (!args.rows) {
    if (args.initial_state) ends.from = args.initial_state + dense;
  } else {
    const long long row = read_index(args.rows, args.rows_are_64_bit, work.sequence);
    if (row >= 0 && row < args.num_rows) {
      ends.to[1] = args.initial_state + (is_bf16 ? 2 : 4) * row * args.row_stride + work.head * state_bytes;
      if (args.has_initial_state[work.sequence]) ends.from = ends.to[1];
    }
  }
  if (args.checkpoint_state) {
    const long long offset = read_index(args.checkpoint_offsets, args.bounds_are_64_bit, work.sequence);
    ends.checkpoint = args.checkpoint_state + dense;
    const long long chunk = offset / kChunk - 1 - work.first_chunk;
    if (offset > 0 && chunk >= 0 && chunk * kChunk < work.tokens) ends.checkpoint_chunk = static_cast<int>(chunk);
  }
  return ends;
}

// A block: `split` of its head's values, or with kOutput false, whether it makes M.
template <bool kBounded, int kTiles, bool kOutput>
__device__ void run(const Args& args) {
  constexpr int kSplits = kOutput ? 2 / kTiles : 2;
  Shared<kBounded>& shared = *reinterpret_cast<Shared<kBounded>*>(ptx::shared_memory());
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int split = blockIdx.x % kSplits;
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  if (warp == 0) {
    const u32 num_heads = static_cast<u32>(args.num_heads);
    // The last first: an engine's long prompts come after sequences of one token.
    const long long blocks = (kOutput ? args.num_sequences : 0) + args.slots;
    const long long number = blocks - 1 - blockIdx.x / kSplits / num_heads;
    Work work = find_work(args, number, kOutput, lane);
    if (lane == 0) {
      work.head = static_cast<int>(blockIdx.x / kSplits % num_heads);
      shared.work = work;
      for (int i = 0; i < kStages; ++i) {
        ptx::init_barrier(&shared.copied[i], 32 * kCopyWarps);
        ptx::init_barrier(&shared.prepared[i], 2 * ptx::kArrivalsOfWarp);
        ptx::init_barrier(&shared.used[i], kScanWarps * ptx::kArrivalsOfWarp);
      }
    }
  }
  ptx::block_sync();
  // Each warp reads it anew, once it has its registers.
  if (shared.work.sequence < 0 || (!kOutput && shared.work.is_last)) return;
  const bool is_first = shared.work.first_chunk == 0;
  const bool makes_map = !kOutput && split == 1 && !is_first;
  // The state that a sequence begins with is kept where the first M would be: its last segment may overwrite it.
  const bool keeps_state = !kOutput && split == 1 && is_first;
  const auto read_work = [&] {
    Work work = shared.work;
    if (keeps_state) work.tokens = 0;
    return work;
  };

  if (warp < kScanWarps) {
    ptx::take_registers<kScanRegisters<kTiles>>();
    const Work work = read_work();
    Ends ends = ends_of_sequence(args, work);
    const long long place = (work.slot * args.num_heads + work.head) * kDim * kDim;
    if (kOutput && !(is_first && work.is_last)) {
      const float* kept = is_first ? args.maps + place : args.ends + place - args.num_heads * kDim * kDim;
      ends.from = reinterpret_cast<const char*>(kept);
      ends.from_is_bf16 = false;
    }
    if (!kOutput) {
      if (!is_first) ends.from = nullptr;
      ends.from_identity = makes_map;
      ends.to[0] = reinterpret_cast<char*>((makes_map || keeps_state ? args.maps : args.ends) + place);
      ends.to_is_bf16[0] = false;
      ends.checkpoint_chunk = -1;
    }
    if (!kOutput || !work.is_last) ends.to[1] = nullptr;
    if (kOutput && !work.is_last) ends.to[0] = nullptr;
    const int first_row = (kOutput ? split * kScanWarps * kTiles * 16 : 0) + warp * kTiles * 16;
    scan_chunks<kBounded, kTiles, kOutput>(args, shared, work, first_row, ends, lane);
  } else if (warp < kScanWarps + kPrepareWarps) {
    if constexpr (kPrepareRegisters<kTiles> > 128) ptx::take_registers<kPrepareRegisters<kTiles>>();
    const int thread = threadIdx.x - 32 * kScanWarps;
    // Beside the scan of half the values there is room for the longer code, which is faster.
    constexpr bool kShort = !kBounded && kTiles == 2;
    prepare_chunks<kBounded, kOutput, kShort>(args, shared, read_work(), thread / 64, thread % 64);
  } else {
    ptx::give_registers<kCopyRegisters>();
    const int tensor = warp - kScanWarps - kPrepareWarps;
    const bool wanted = tensor == 0 ? kOutput : tensor != 2 || !makes_map;
    copy_chunks<kBounded>(args, shared, read_work(), tensor, wanted, lane);
  }
}

// Adds to the end of each segment, made as if it began with zeros, what the segments before it leave:
// end += (end before) M. A block takes 16 rows of S, a warp 16 columns. Both factors are split into two bfloat16.
constexpr int kCombineThreads = 256;
constexpr int kCombineRows = 16;
constexpr int kCombineRow = 2 * kDim + 16;  // bytes from row to row, so that eight rows lie in different banks

struct CombineShared {
  // Of S, in turn: bfloat16, and what that leaves.
  char high[2][kCombineRows * kCombineRow];
  char low[2][kCombineRows * kCombineRow];
};
static_assert(sizeof(CombineShared) == 17408, "dynamic shared memory");

// What a warp needs of M: [steps of 16 rows][tiles of 8 columns], see write_map.
using Map = uint4[kDim / 16][2];

__device__ __forceinline__ void combine(const Args& args) {
  CombineShared& shared = *reinterpret_cast<CombineShared*>(ptx::shared_memory());
  constexpr int kParts = kDim / kCombineRows;
  const int first_row = kCombineRows * (blockIdx.x % kParts);
  const u32 num_heads = static_cast<u32>(args.num_heads);
  const int head = static_cast<int>(blockIdx.x / kParts % num_heads);
  const long long number = blockIdx.x / kParts / num_heads;
  const int lane = threadIdx.x % 32, first_column = 16 * (threadIdx.x / 32);
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  // Sequences of more than two segments, of which there are at most half as many as slots.
  long long sequence = number;
  if (args.num_sequences > args.slots / 2) {
    sequence = find_sequence(args, number, 2 * args.segment_tokens, false, lane);
    if (first_number(args, sequence, 2 * args.segment_tokens, false) != number) return;
  }
  const long long length = read_index(args.cu_seqlens, args.bounds_are_64_bit, sequence + 1) -
                           read_index(args.cu_seqlens, args.bounds_are_64_bit, sequence);
  const long long segments = (length + args.segment_tokens - 1) / args.segment_tokens;
  if (segments < 3) return;
  const long long step = args.num_heads * kDim * kDim;  // from one segment to the next
  const long long slot = first_number(args, sequence, args.segment_tokens, false);
  const long long place = (slot * args.num_heads + head) * kDim * kDim;
  const int row = lane / 4, column = first_column + 2 * (lane % 4);
  float* end = args.ends + place + first_row * kDim;
  const uint4* from = reinterpret_cast<const uint4*>(args.maps + place + step) + first_column / 8 * (kDim / 16) * 32 + lane;
  const auto read_map = [&](int i, int tile) { return from[(tile * (kDim / 16) + i) * 32]; };
  const auto read_end = [&](float(&to)[2][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = *reinterpret_cast<const float2*>(end + (row + i % 2 * 8) * kDim + column + i / 2 * 8);
      to[i / 2][i % 2 * 2] = pair.x;
      to[i / 2][i % 2 * 2 + 1] = pair.y;
    }
  };
  const auto keep = [&](const float(&x)[2][4], int buffer) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = (row + i % 2 * 8) * kCombineRow + 2 * (column + i / 2 * 8);
      split(x[i / 2][i % 2 * 2], x[i / 2][i % 2 * 2 + 1], *reinterpret_cast<u32*>(shared.high[buffer] + at),
            *reinterpret_cast<u32*>(shared.low[buffer] + at));
    }
  };
  float first[2][4];
  read_end(first);
  keep(first, 0);
  Map map;
#pragma unroll
  for (int i = 0; i < kDim / 16; ++i) map[i][0] = read_map(i, 0), map[i][1] = read_map(i, 1);
  for (long long segment = 1; segment < segments - 1; ++segment) {
    const bool is_last = segment == segments - 2;
    const int part = lane % 16 * kCombineRow + 16 * (lane / 16), buffer = (segment - 1) % 2;
    float ends[2][4], sums[2][3][4] = {};
    end += step;
    from += step / 4;
    read_end(ends);
    ptx::block_sync();
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
      u32 s[4], rest[4];
      ptx::load_matrices(s, shared.high[buffer] + part + 32 * i);
      ptx::load_matrices(rest, shared.low[buffer] + part + 32 * i);
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const uint4 m = map[i][tile];
        ptx::mma_bf16(sums[tile][0], s, m.x, m.y);
        ptx::mma_bf16(sums[tile][1], s, m.z, m.w);
        ptx::mma_bf16(sums[tile][2], rest, m.x, m.y);
        if (!is_last) map[i][tile] = read_map(i, tile);  // of the next segment
      }
    }
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) ends[tile][i] += sums[tile][0][i] + (sums[tile][1][i] + sums[tile][2][i]);
    }
    keep(ends, 1 - buffer);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      *reinterpret_cast<float2*>(end + (row + i % 2 * 8) * kDim + column + i / 2 * 8) =
          make_float2(ends[i / 2][i % 2 * 2], ends[i / 2][i % 2 * 2 + 1]);
    }
  }
}

}  // namespace

#define KDA_KERNEL(name, bounded, tiles, output)                              \
  extern "C" __global__ void __launch_bounds__(kThreads, 1) name(Args args) { \
    run<bounded, tiles, output>(args);                                        \
  }

KDA_KERNEL(kda_prefill_bounded_128, true, 2, true)
KDA_KERNEL(kda_prefill_bounded_64, true, 1, true)
KDA_KERNEL(kda_prefill_softplus_128, false, 2, true)
KDA_KERNEL(kda_prefill_softplus_64, false, 1, true)
KDA_KERNEL(kda_segments_bounded, true, 2, false)
KDA_KERNEL(kda_segments_softplus, false, 2, false)

extern "C" __global__ void __launch_bounds__(kCombineThreads) kda_combine(Args args) { combine(args); }
