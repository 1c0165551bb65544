// archs: 80 89 90a 100 120
//
// Gathers paged KV cache into contiguous K and V, token by token, at the speed of the memory.
//
// `gather_slots_*` and `gather_table_*` read paged caches, whose tokens are dense runs of bytes: one a head, or one
// for all heads. Work is cut by bytes of output, whoever they belong to, so one request of a million tokens and a
// thousand requests of a thousand keep the GPU equally busy. A thread block moves about 4 KiB: the narrower the stretch
// of memory that all blocks of a moment touch, the better DRAM keeps its rows open.
//
// `gather_classic_*` reads the classic layout, where the bytes of a token lie scattered between those of its block's
// other tokens, and `gather_elements_*` reads anything, an element at a time.
//
// A token whose slot or block is not in the cache, or past the end of its row of the table, is never read; its row of
// the output stays as it was.

namespace {

constexpr long long kNowhere = -1;
constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// Divides numbers below 2^31 by one multiplication; kernels/gather_plan.py computes it.
struct Divisor {
  unsigned multiplier;
  unsigned shift;
};

__device__ __forceinline__ unsigned divide(unsigned number, Divisor by) {
  return static_cast<unsigned>((static_cast<unsigned long long>(number) * by.multiplier) >> by.shift);
}

__device__ __forceinline__ long long divide(long long number, Divisor by, long long divisor) {
  return number >> 31 ? number / divisor : divide(static_cast<unsigned>(number), by);
}

__device__ __forceinline__ long long read_slot(const void* slots, bool slots_are_64_bit, long long row) {
  return slots_are_64_bit ? static_cast<const long long*>(slots)[row] : static_cast<const int*>(slots)[row];
}

__device__ __forceinline__ float read_scale(const float* scales, long long stride, long long head) {
  return scales == nullptr ? 1.0f : scales[head * stride];
}

// A kernel may be launched while the one before it in the stream still runs, and touches memory only after this. What it
// then reads must not be read by __ldg: such loads are for memory that nobody writes, and ptxas moves them up past the
// wait.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel come as early: when every thread block has ended or said so. Saying so takes time, so only the
// last ones do: about as many as an H200 runs at once. Another number is as right.
constexpr unsigned kLastBlocks = 1584;

__device__ __forceinline__ void let_next_kernel_come() {
#if __CUDA_ARCH__ >= 900
  if (gridDim.x - blockIdx.x <= kLastBlocks) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Into L2, which is allowed before the wait: nothing is read yet.
__device__ __forceinline__ void prefetch(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// ---- What happens to the bytes on their way --------------------------------------------------------------------------

template <typename T>
struct Copy {
  using In = T;
  using Out = T;
  static constexpr bool kScaled = false;
  static __device__ __forceinline__ Out convert(In value, float) { return value; }
};

// Two fp8 numbers as two fp16, exactly.
__device__ __forceinline__ unsigned e4m3x2_to_half2(unsigned short pair) {
#if __CUDA_ARCH__ >= 890
  unsigned out;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(out) : "h"(pair));
  return out;
#else
  const unsigned spread = __byte_perm(pair, 0, 0x1404);  // one number in the upper half of each 16 bits
  // Exponent and mantissa in their places give 2^-8 of the value, denormals too; NaN would become 480.
  unsigned out = (spread & 0x80008000u) | ((spread & 0x7f007f00u) >> 1);
  asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(out) : "r"(0x5c005c00u));
  if ((spread & 0x7f00u) == 0x7f00u) out |= 0x7fffu;
  if ((spread & 0x7f000000u) == 0x7f000000u) out |= 0x7fff0000u;
  return out;
#endif
}

__device__ __forceinline__ unsigned e5m2x2_to_half2(unsigned short pair) { return __byte_perm(pair, 0, 0x1404); }

// value * scale, rounded to odd: rounding the result once more, to fewer bits, gives what rounding the exact product
// would. (Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to odd")
__device__ __forceinline__ float multiply_to_odd(float value, float scale) {
  const bool exact = __fmul_rd(value, scale) == __fmul_ru(value, scale);
  return __int_as_float(__float_as_int(__fmul_rz(value, scale)) | (exact ? 0 : 1));
}

__device__ __forceinline__ float half_bits_to_float(unsigned short bits) {
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(bits));
  return out;
}

enum class Fp8 { kE4M3, kE5M2 };
enum class Wide { kHalf, kBFloat16 };

template <Wide kWide>
__device__ __forceinline__ unsigned pack(float low, float high) {
  unsigned out;
  if (kWide == Wide::kHalf) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  }
  return out;
}

// Whether products of fp8 numbers, of 4 bits or fewer, with this scale are rounded in fp32 at all.
__device__ __forceinline__ bool rounds_in_fp32(float scale) {
  return (__float_as_uint(scale) & 0xfu) != 0 || fabsf(scale) < 0x1p-100f;
}

// Whether rounding a product that was rounded to fp32 already may go astray: where it lies halfway between two numbers
// of the result, or is too small for the result to have all its bits.
template <Wide kWide>
__device__ __forceinline__ bool needs_care(float product) {
  const unsigned bits = __float_as_uint(product);
  if (kWide == Wide::kBFloat16) return (bits & 0xffffu) == 0x8000u;
  return (bits & 0x1fffu) == 0x1000u || (fabsf(product) < 0x1p-14f && product != 0.0f);
}

// kPairs pairs of fp8 numbers times scale, each rounded once.
template <Fp8 kFp8, Wide kWide, int kPairs>
__device__ __forceinline__ void dequantize(const unsigned short* pairs, float scale, unsigned* out) {
  float low[kPairs], high[kPairs];
  bool care = false;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const unsigned halves = kFp8 == Fp8::kE4M3 ? e4m3x2_to_half2(pairs[i]) : e5m2x2_to_half2(pairs[i]);
    low[i] = half_bits_to_float(static_cast<unsigned short>(halves));
    high[i] = half_bits_to_float(static_cast<unsigned short>(halves >> 16));
    const float low_product = low[i] * scale, high_product = high[i] * scale;
    care |= needs_care<kWide>(low_product) || needs_care<kWide>(high_product);
    out[i] = pack<kWide>(low_product, high_product);
  }
  if (care && rounds_in_fp32(scale)) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      out[i] = pack<kWide>(multiply_to_odd(low[i], scale), multiply_to_odd(high[i], scale));
    }
  }
}

template <Fp8 kFp8, Wide kWide>
struct Dequantize {
  using In = unsigned char;
  using Out = unsigned short;
  static constexpr bool kScaled = true;
  static __device__ __forceinline__ Out convert(In value, float scale) {
    const unsigned short pair = value;
    unsigned out;
    dequantize<kFp8, kWide, 1>(&pair, scale, &out);
    return static_cast<Out>(out);
  }
};

template <Fp8 kFp8, Wide kWide>
struct Dequantize8 {
  using In = uint2;
  using Out = uint4;
  static constexpr bool kScaled = true;
  static __device__ __forceinline__ Out convert(In value, float scale) {
    const unsigned short pairs[4] = {static_cast<unsigned short>(value.x), static_cast<unsigned short>(value.x >> 16),
                                     static_cast<unsigned short>(value.y), static_cast<unsigned short>(value.y >> 16)};
    unsigned out[4];
    dequantize<kFp8, kWide, 4>(pairs, scale, out);
    return make_uint4(out[0], out[1], out[2], out[3]);
  }
};

// ---- Paged caches ----------------------------------------------------------------------------------------------------

constexpr int kNarrowThreads = 64;

// Every member is 8 bytes wide; kernels/gather_plan.py packs them in this order. Strides and sizes in bytes unless noted.
struct PagedArgs {
  char* key;
  char* value;  // unused when there is one plane
  const char* key_cache;
  const char* value_cache;
  const float* key_scale;  // null: 1
  const float* value_scale;
  const void* rows;  // slots of the rows of the output, or the block table
  const int* cu_seqlens_k;
  const int* seq_starts;
  long long num_rows;
  long long slots_are_64_bit;
  long long num_reqs;
  long long max_positions;  // max_blocks * block_size, at most 2^32
  long long max_blocks;
  long long table_stride;  // in entries
  long long num_blocks;
  long long block_size;  // tokens a block
  long long block_stride;
  long long token_stride;
  long long run_stride;  // from one run of a token to its next
  long long out_token_stride;
  long long out_run_stride;
  long long runs;       // contiguous runs of a token in a plane: its heads, or 1 if they are one run
  long long token_vecs;  // vectors a token, in all planes
  long long run_vecs;    // vectors a run
  long long scale_stride;  // in entries
  long long row_blocks;    // thread blocks that a wide or dense token takes, each moving a piece
  long long pieces;        // of a wide token, or of a plane of a dense one
  long long piece_vecs;
  long long step_runs;  // from a thread's vector to its next, in runs and the vectors that remain
  long long step_vecs;
  Divisor by_row_blocks;
  Divisor by_token_vecs;
  Divisor by_run_vecs;
  Divisor by_block_size;
};

// Byte offset of a slot in either cache, or kNowhere.
__device__ __forceinline__ long long find_slot(const PagedArgs& a, long long slot) {
  if (slot < 0 || slot >= a.num_blocks * a.block_size) return kNowhere;
  const long long block = divide(slot, a.by_block_size, a.block_size);
  return block * a.block_stride + (slot - block * a.block_size) * a.token_stride;
}

// Byte offset in either cache of a request's token, or kNowhere. Rows are below 2^31, as cu_seqlens_k is, so positions
// are below 2^32 and negative ones wrap to no less than 2^31.
__device__ __forceinline__ long long find_position(const PagedArgs& a, unsigned request, unsigned position) {
  if (position >= a.max_positions) return kNowhere;
  const unsigned block_size = static_cast<unsigned>(a.block_size);
  const unsigned logical_block = position >> 31 ? position / block_size : divide(position, a.by_block_size);
  const int* const table = static_cast<const int*>(a.rows) + request * a.table_stride;
  const unsigned block = table[logical_block];
  if (block >= a.num_blocks) return kNowhere;
  return block * a.block_stride + (position - logical_block * block_size) * a.token_stride;
}

// Byte offset in either cache of the token that belongs in row `row`, or kNowhere. Its request is the last one with
// cu_seqlens_k[request] <= row.
__device__ __forceinline__ long long find_token(const PagedArgs& a, unsigned row) {
  unsigned request = 0, above = static_cast<unsigned>(a.num_reqs);
  while (above - request > 1) {
    const unsigned middle = (request + above) >> 1;
    if (a.cu_seqlens_k[middle] <= row) {
      request = middle;
    } else {
      above = middle;
    }
  }
  return find_position(a, request, row - a.cu_seqlens_k[request] + a.seq_starts[request]);
}

// The same by a whole warp, with fewer loads that wait for each other: 32 bounds at a time, so that 4,096 requests take
// 3 steps and not 12, and what belongs to the request found is read with the last step.
__device__ __forceinline__ long long find_token_by_warp(const PagedArgs& a, unsigned row, unsigned lane) {
  unsigned request = 0, above = static_cast<unsigned>(a.num_reqs);
  while (true) {
    const unsigned step = (above - request + kWarp - 1) / kWarp;
    const unsigned probe = request + lane * step;
    unsigned bound = 0, start = 0;
    if (probe < above) {
      bound = a.cu_seqlens_k[probe];
      if (step == 1) start = a.seq_starts[probe];
    }
    const unsigned found = 31 - __clz(__ballot_sync(kAllLanes, probe < above && bound <= row) | 1);
    request += found * step;
    if (step == 1) {
      return find_position(a, request, row + __shfl_sync(kAllLanes, start - bound, found));
    }
    above = min(request + step, above);
  }
}

// Where a vector of a token comes from and goes to. Runs are numbered through K, then V.
struct Place {
  const char* key_from;
  const char* value_from;
  char* key_to;
  char* value_to;
  unsigned run;
  unsigned vec;

  __device__ __forceinline__ Place(const PagedArgs& a, long long source, long long row, unsigned index) {
    run = divide(index, a.by_run_vecs);
    vec = index - run * static_cast<unsigned>(a.run_vecs);
    key_from = a.key_cache + source;
    value_from = a.value_cache + source - a.runs * a.run_stride;
    key_to = a.key + row * a.out_token_stride;
    value_to = a.value + row * a.out_token_stride - a.runs * a.out_run_stride;
  }

  // blockDim.x vectors on.
  __device__ __forceinline__ void advance(const PagedArgs& a) {
    run += static_cast<unsigned>(a.step_runs);
    vec += static_cast<unsigned>(a.step_vecs);
    if (vec >= a.run_vecs) {
      vec -= static_cast<unsigned>(a.run_vecs);
      ++run;
    }
  }

  template <typename T>
  __device__ __forceinline__ const T* from(const PagedArgs& a) const {
    return reinterpret_cast<const T*>((run < a.runs ? key_from : value_from) + run * a.run_stride) + vec;
  }

  template <typename T>
  __device__ __forceinline__ char* to(const PagedArgs& a) const {
    return (run < a.runs ? key_to : value_to) + run * a.out_run_stride + vec * sizeof(T);
  }

  __device__ __forceinline__ float scale(const PagedArgs& a) const {
    return run < a.runs ? read_scale(a.key_scale, a.scale_stride, run)
                        : read_scale(a.value_scale, a.scale_stride, run - a.runs);
  }
};

// A line of each table a block, before the wait: the first blocks bring all of them.
template <bool kTable>
__device__ __forceinline__ void prefetch_tables(const PagedArgs& a) {
  if (threadIdx.x != 0) return;
  const long long entry = blockIdx.x * 32ll;
  if (kTable) {
    if (entry < (a.num_reqs - 1) * a.table_stride + a.max_blocks) prefetch(static_cast<const int*>(a.rows) + entry);
    if (entry < a.num_reqs) prefetch(a.seq_starts + entry);
    if (entry <= a.num_reqs) prefetch(a.cu_seqlens_k + entry);
  } else if (entry < a.num_rows * (a.slots_are_64_bit + 1)) {
    prefetch(static_cast<const int*>(a.rows) + entry);
  }
}

// Byte offset in either cache of the token that belongs in row `row`, found by a whole warp, or kNowhere.
template <bool kTable>
__device__ __forceinline__ long long find_source(const PagedArgs& a, unsigned row) {
  if (!kTable) return find_slot(a, read_slot(a.rows, a.slots_are_64_bit, row));
  const long long source = find_token_by_warp(a, row, threadIdx.x % kWarp);
  return row < static_cast<unsigned>(a.cu_seqlens_k[a.num_reqs]) ? source : kNowhere;
}

// Wide tokens whose bytes lie together, in each plane: a block moves one piece of a plane of one token.
template <bool kTable, int kLoads>
__device__ __forceinline__ void gather_dense(const PagedArgs& a) {
  prefetch_tables<kTable>(a);
  const unsigned row = divide(blockIdx.x, a.by_row_blocks);
  unsigned piece = blockIdx.x - row * static_cast<unsigned>(a.row_blocks);
  const bool of_value = piece >= a.pieces;
  if (of_value) piece -= static_cast<unsigned>(a.pieces);
  const unsigned first = piece * static_cast<unsigned>(a.piece_vecs) + threadIdx.x;
  const unsigned end = min((piece + 1) * static_cast<unsigned>(a.piece_vecs), static_cast<unsigned>(a.run_vecs));
  wait_for_previous_kernel();
  const long long source = find_source<kTable>(a, row);
  if (source == kNowhere) return;

  const uint4* const from = reinterpret_cast<const uint4*>((of_value ? a.value_cache : a.key_cache) + source) + first;
  uint4* const to = reinterpret_cast<uint4*>((of_value ? a.value : a.key) + row * a.out_token_stride) + first;
  uint4 values[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (first + i * blockDim.x < end) values[i] = __ldcg(from + i * blockDim.x);
  }
  let_next_kernel_come();
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (first + i * blockDim.x < end) to[i * blockDim.x] = values[i];
  }
}

// Wide tokens: a block moves one piece of one token, each thread kLoads vectors, all loads before the first store.
// Cached values are read once, so past L1.
template <typename Convert, bool kTable, int kLoads>
__device__ __forceinline__ void gather_wide(const PagedArgs& a) {
  prefetch_tables<kTable>(a);
  const unsigned row = divide(blockIdx.x, a.by_row_blocks);
  const unsigned piece = blockIdx.x - row * static_cast<unsigned>(a.row_blocks);
  const unsigned first = piece * static_cast<unsigned>(a.piece_vecs);
  const unsigned end = min(first + static_cast<unsigned>(a.piece_vecs), static_cast<unsigned>(a.token_vecs));
  wait_for_previous_kernel();
  const long long source = find_source<kTable>(a, row);
  if (source == kNowhere) return;

  Place place(a, source, row, first + threadIdx.x);
  typename Convert::In values[kLoads];
  float scales[kLoads];
  char* to[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    to[i] = nullptr;
    if (first + i * blockDim.x + threadIdx.x < end) {
      values[i] = __ldcg(place.from<typename Convert::In>(a));
      if (Convert::kScaled) scales[i] = place.scale(a);
      to[i] = place.to<typename Convert::Out>(a);
    }
    place.advance(a);
  }
  let_next_kernel_come();
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (to[i] != nullptr) *reinterpret_cast<typename Convert::Out*>(to[i]) = Convert::convert(values[i], scales[i]);
  }
}

// Narrow tokens: a block moves a tile of as many tokens as that takes.
template <typename Convert, bool kTable, int kLoads>
__device__ __forceinline__ void gather_narrow(const PagedArgs& a) {
  constexpr int kTile = kNarrowThreads * kLoads;
  __shared__ long long sources[kTable ? kTile : 1];  // of the rows a tile touches, at most one a vector

  wait_for_previous_kernel();
  const unsigned token_vecs = static_cast<unsigned>(a.token_vecs);
  long long num_rows = a.num_rows;
  if (kTable) num_rows = min(num_rows, static_cast<long long>(a.cu_seqlens_k[a.num_reqs]));
  const long long vecs = num_rows * token_vecs;
  const long long tile = static_cast<long long>(blockIdx.x) * kTile;
  if (tile >= vecs) return;
  const long long first_row = divide(tile, a.by_token_vecs, token_vecs);
  const unsigned skip = static_cast<unsigned>(tile - first_row * token_vecs);
  const unsigned count = static_cast<unsigned>(min(static_cast<long long>(kTile), vecs - tile));

  if (kTable) {
    const unsigned tile_rows = divide(skip + count - 1, a.by_token_vecs) + 1;
    for (unsigned i = threadIdx.x; i < tile_rows; i += kNarrowThreads) {
      sources[i] = find_token(a, static_cast<unsigned>(first_row) + i);
    }
    __syncthreads();
  }
  typename Convert::In values[kLoads];
  float scales[kLoads];
  char* to[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const unsigned index = i * kNarrowThreads + threadIdx.x;
    to[i] = nullptr;
    if (index < count) {
      const unsigned row = divide(skip + index, a.by_token_vecs);
      const long long source =
          kTable ? sources[row] : find_slot(a, read_slot(a.rows, a.slots_are_64_bit, first_row + row));
      if (source != kNowhere) {
        const Place place(a, source, first_row + row, skip + index - row * token_vecs);
        values[i] = __ldcg(place.from<typename Convert::In>(a));
        if (Convert::kScaled) scales[i] = place.scale(a);
        to[i] = place.to<typename Convert::Out>(a);
      }
    }
  }
  let_next_kernel_come();
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (to[i] != nullptr) *reinterpret_cast<typename Convert::Out*>(to[i]) = Convert::convert(values[i], scales[i]);
  }
}

// ---- Classic caches, and any ------------------------------------------------------------------------------------------

// K [num_blocks, num_heads, head_size / x, block_size, x], V [num_blocks, num_heads, head_size, block_size]; for paged
// caches x is head_size. Strides in bytes.
struct ScatteredArgs {
  char* key;
  char* value;
  const char* key_cache;
  const char* value_cache;
  const float* key_scale;  // null: 1
  const float* value_scale;
  const void* slots;
  long long num_rows;
  long long slots_are_64_bit;
  long long num_slots;
  long long block_size;
  long long num_heads;
  long long head_size;
  long long x;
  long long key_block_stride;
  long long key_head_stride;
  long long key_chunk_stride;  // from x elements to the next x
  long long key_token_stride;
  long long value_block_stride;
  long long value_head_stride;
  long long value_dim_stride;
  long long value_token_stride;
  long long key_out_token_stride;
  long long key_out_head_stride;
  long long value_out_token_stride;
  long long value_out_head_stride;
  long long scale_stride;  // in entries
  long long head_group;    // heads a thread block of gather_classic takes
  Divisor by_block_size;
};

// What a thread block of gather_classic writes of each head, and with how many warps.
constexpr unsigned kClassicTokens = 8;
constexpr unsigned kKeyWarps = 2, kValueWarps = 4;

template <typename T>
__device__ __forceinline__ T element_of(const uint4& chunk, unsigned element) {
  constexpr unsigned kPerWord = 4 / sizeof(T);
  const unsigned word = element / kPerWord;
  const unsigned pair = word & 1 ? (word & 2 ? chunk.w : chunk.y) : (word & 2 ? chunk.z : chunk.x);
  return static_cast<T>(pair >> (element % kPerWord * 8 * sizeof(T)));
}

template <typename Convert>
__device__ __forceinline__ void convert_chunk(char* to, const uint4& chunk, float scale) {
  using In = typename Convert::In;
  if (!Convert::kScaled) {
    *reinterpret_cast<uint4*>(to) = chunk;
  } else {
    alignas(16) typename Convert::Out out[16 / sizeof(In)];
#pragma unroll
    for (unsigned i = 0; i < 16 / sizeof(In); ++i) out[i] = Convert::convert(element_of<In>(chunk, i), scale);
#pragma unroll
    for (unsigned i = 0; i < sizeof(out) / 16; ++i) {
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(out)[i];
    }
  }
}

// A thread block writes kClassicTokens tokens of a few heads; some warps K, the others V.
//
// A chunk of 16 bytes holds x elements of one token in K, but one element of x tokens in V: a warp reads whole chunks of
// V, neighbours in memory, and picks from each the elements of the tokens asked for. Consecutive tokens out of the same
// chunks (a segment: whole pages are made of them) share the reads.
template <typename Convert>
__device__ __forceinline__ void gather_classic(const ScatteredArgs& a) {
  using In = typename Convert::In;
  using Out = typename Convert::Out;
  constexpr unsigned kX = 16 / sizeof(In);
  constexpr unsigned kKeyLoads = 2, kValueLoads = 4;
  wait_for_previous_kernel();

  // All tokens of some heads before the next heads: tokens of one page that are far apart find it in L2.
  const unsigned tiles = static_cast<unsigned>((a.num_rows + kClassicTokens - 1) / kClassicTokens);
  const unsigned group = blockIdx.x / tiles;
  const long long tile = static_cast<long long>(blockIdx.x - group * tiles) * kClassicTokens;
  const unsigned first_head = group * static_cast<unsigned>(a.head_group);
  const unsigned heads = min(static_cast<unsigned>(a.head_group), static_cast<unsigned>(a.num_heads) - first_head);
  const unsigned head_size = static_cast<unsigned>(a.head_size);
  const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;

  // Lane t holds where token t of the tile is.
  const unsigned token = lane % kClassicTokens;
  long long block = kNowhere;
  unsigned offset = 0;
  if (tile + token < a.num_rows) {
    const long long slot = read_slot(a.slots, a.slots_are_64_bit, tile + token);
    if (slot >= 0 && slot < a.num_slots) {
      block = divide(slot, a.by_block_size, a.block_size);
      offset = static_cast<unsigned>(slot - block * a.block_size);
    }
  }

  let_next_kernel_come();

  if (warp >= kValueWarps) {
    if (block == kNowhere) return;
    const char* from =
        a.key_cache + block * a.key_block_stride + first_head * a.key_head_stride + offset * a.key_token_stride;
    char* to = a.key + (tile + token) * a.key_out_token_stride + first_head * a.key_out_head_stride;
    const unsigned first = (threadIdx.x - kValueWarps * kWarp) / kClassicTokens;
    constexpr unsigned kStep = kKeyWarps * kWarp / kClassicTokens;
    for (unsigned chunk = first; chunk < head_size / kX; chunk += kStep) {
      const char* const chunk_from = from + chunk * a.key_chunk_stride;
      char* const chunk_to = to + chunk * kX * sizeof(Out);
      for (unsigned head = 0; head < heads; head += kKeyLoads) {
        uint4 chunks[kKeyLoads];
#pragma unroll
        for (unsigned i = 0; i < kKeyLoads; ++i) {
          if (head + i < heads) {
            chunks[i] = *reinterpret_cast<const uint4*>(chunk_from + (head + i) * a.key_head_stride);
          }
        }
#pragma unroll
        for (unsigned i = 0; i < kKeyLoads; ++i) {
          if (head + i < heads) {
            const float scale =
                Convert::kScaled ? read_scale(a.key_scale, a.scale_stride, first_head + head + i) : 1.0f;
            convert_chunk<Convert>(chunk_to + (head + i) * a.key_out_head_stride, chunks[i], scale);
          }
        }
      }
    }
    return;
  }

  const long long page_chunk = block * (a.block_size / kX + 1) + offset / kX;
  const long long before = __shfl_up_sync(kAllLanes, page_chunk, 1);
  const bool starts = token == 0 || block == kNowhere || page_chunk != before;
  const unsigned starts_at = __ballot_sync(kAllLanes, starts) | 1u << kClassicTokens;
  const bool is_segment = starts && block != kNowhere && lane < kClassicTokens;
  const unsigned segments = __ballot_sync(kAllLanes, is_segment);
  const unsigned rank = __popc(segments & ((1u << lane) - 1));
  const long long value_from = block * a.value_block_stride + offset / kX * 16;
  const unsigned units = __popc(segments) * heads;
  for (unsigned unit = warp; unit < units; unit += kValueWarps) {
    const unsigned segment = unit / heads;
    const unsigned head = first_head + unit - segment * heads;
    const unsigned first = __ffs(__ballot_sync(kAllLanes, is_segment && rank == segment)) - 1;
    const unsigned end = __ffs(starts_at & ~((2u << first) - 1)) - 1;
    const char* const from = a.value_cache + __shfl_sync(kAllLanes, value_from, first) + head * a.value_head_stride;
    char* const to = a.value + tile * a.value_out_token_stride + head * a.value_out_head_stride;
    const float scale = Convert::kScaled ? read_scale(a.value_scale, a.scale_stride, head) : 1.0f;
    for (unsigned base = 0; base < head_size; base += kValueLoads * kWarp) {
      const unsigned dim = base + lane;
      uint4 chunks[kValueLoads];
#pragma unroll
      for (unsigned i = 0; i < kValueLoads; ++i) {
        if (dim + i * kWarp < head_size) {
          chunks[i] = *reinterpret_cast<const uint4*>(from + (dim + i * kWarp) * a.value_dim_stride);
        }
      }
      for (unsigned t = first; t < end; ++t) {
        const unsigned element = __shfl_sync(kAllLanes, offset, t) % kX;
        Out* const row = reinterpret_cast<Out*>(to + t * a.value_out_token_stride) + dim;
#pragma unroll
        for (unsigned i = 0; i < kValueLoads; ++i) {
          if (dim + i * kWarp < head_size) {
            row[i * kWarp] = Convert::convert(element_of<In>(chunks[i], element), scale);
          }
        }
      }
    }
  }
}

// The plain kernel of vLLM's first year: a thread block a token, an element at a time. Kept as the yardstick, and for
// what the others cannot take.
template <typename Convert>
__device__ __forceinline__ void gather_elements(const ScatteredArgs& a) {
  using In = typename Convert::In;
  using Out = typename Convert::Out;
  const long long row = blockIdx.x;
  const long long slot = read_slot(a.slots, a.slots_are_64_bit, row);
  if (slot < 0 || slot >= a.num_slots) return;
  const long long block = slot / a.block_size;
  const long long offset = slot % a.block_size;
  const int head_size = static_cast<int>(a.head_size), x = static_cast<int>(a.x);
  const int elements = static_cast<int>(a.num_heads) * head_size;
  for (int i = threadIdx.x; i < elements; i += blockDim.x) {
    const int head = i / head_size;
    const int dim = i % head_size;
    const char* const key = a.key_cache + block * a.key_block_stride + head * a.key_head_stride +
                            dim / x * a.key_chunk_stride + offset * a.key_token_stride + dim % x * sizeof(In);
    const char* const value = a.value_cache + block * a.value_block_stride + head * a.value_head_stride +
                              dim * a.value_dim_stride + offset * a.value_token_stride;
    const float key_scale = Convert::kScaled ? read_scale(a.key_scale, a.scale_stride, head) : 1.0f;
    const float value_scale = Convert::kScaled ? read_scale(a.value_scale, a.scale_stride, head) : 1.0f;
    Out* const key_out = reinterpret_cast<Out*>(a.key + row * a.key_out_token_stride + head * a.key_out_head_stride);
    Out* const value_out =
        reinterpret_cast<Out*>(a.value + row * a.value_out_token_stride + head * a.value_out_head_stride);
    key_out[dim] = Convert::convert(__ldg(reinterpret_cast<const In*>(key)), key_scale);
    value_out[dim] = Convert::convert(__ldg(reinterpret_cast<const In*>(value)), value_scale);
  }
}

}  // namespace

// ---- Entry points: as kernels/loader.py lists them -------------------------------------------------------------------

#define FROM(SOURCE, IS_TABLE, SHAPE, NAME, CONVERT, LOADS)                                                            \
  extern "C" __global__ void gather_##SOURCE##_##SHAPE##_##NAME##_##LOADS(const PagedArgs a) {                         \
    gather_##SHAPE<CONVERT, IS_TABLE, LOADS>(a);                                                                       \
  }
#define PAGED(SHAPE, NAME, CONVERT, LOADS)         \
  FROM(slots, false, SHAPE, NAME, CONVERT, LOADS)  \
  FROM(table, true, SHAPE, NAME, CONVERT, LOADS)
#define SCATTERED(NAME, CONVERT)                                                                                       \
  extern "C" __global__ void gather_classic_##NAME(const ScatteredArgs a) { gather_classic<CONVERT>(a); }              \
  extern "C" __global__ void gather_elements_##NAME(const ScatteredArgs a) { gather_elements<CONVERT>(a); }

#define DENSE(SOURCE, IS_TABLE, LOADS)                                                      \
  extern "C" __global__ void gather_##SOURCE##_dense_16_##LOADS(const PagedArgs a) {        \
    gather_dense<IS_TABLE, LOADS>(a);                                                       \
  }
DENSE(slots, false, 2)
DENSE(table, true, 2)
DENSE(table, true, 4)  // many requests

// Copies, by the bytes of a vector or an element: addresses, strides and runs must be multiples of it.
PAGED(wide, 16, Copy<uint4>, 2)
FROM(table, true, wide, 16, Copy<uint4>, 4)  // many requests
PAGED(narrow, 16, Copy<uint4>, 4)
PAGED(narrow, 8, Copy<uint2>, 4)
PAGED(narrow, 4, Copy<unsigned int>, 4)
PAGED(narrow, 2, Copy<unsigned short>, 4)
PAGED(narrow, 1, Copy<unsigned char>, 4)
SCATTERED(4, Copy<unsigned int>)
SCATTERED(2, Copy<unsigned short>)
SCATTERED(1, Copy<unsigned char>)

// From fp8, eight numbers or one at a time.
#define DEQUANTIZE(NAME, FP8, WIDE)                      \
  using NAME##_one = Dequantize<Fp8::FP8, Wide::WIDE>;   \
  using NAME##_eight = Dequantize8<Fp8::FP8, Wide::WIDE>; \
  PAGED(wide, NAME##_8, NAME##_eight, 4)                 \
  PAGED(narrow, NAME##_8, NAME##_eight, 4)               \
  PAGED(narrow, NAME##_1, NAME##_one, 4)                 \
  SCATTERED(NAME, NAME##_one)
DEQUANTIZE(e4m3_float16, kE4M3, kHalf)
DEQUANTIZE(e4m3_bfloat16, kE4M3, kBFloat16)
DEQUANTIZE(e5m2_float16, kE5M2, kHalf)
DEQUANTIZE(e5m2_bfloat16, kE5M2, kBFloat16)
