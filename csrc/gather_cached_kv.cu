// archs: 80 89 90a 100 120
//
// Gathers paged KV cache into contiguous K and V, token by token, at the speed of the memory.
//
// `gather_slots_*` and `gather_table_*` read paged caches, whose tokens are dense runs of bytes: one a head, or one
// for all heads. Work is cut by bytes: a tile is the same number of bytes of output whoever they belong to, so one
// request of a million tokens and a thousand requests of a thousand keep the GPU equally busy. Tiles are small, 4 KiB
// at 16 bytes a vector: the narrower the stretch of memory that all blocks of a moment touch, the better DRAM keeps
// its rows open.
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

// Divides numbers below 2^31 by one multiplication; kernels/gather.py computes it.
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
  return slots_are_64_bit ? __ldg(static_cast<const long long*>(slots) + row) : __ldg(static_cast<const int*>(slots) + row);
}

__device__ __forceinline__ float read_scale(const float* scales, long long stride, long long head) {
  return scales == nullptr ? 1.0f : __ldg(scales + head * stride);
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

template <Fp8 kFp8, Wide kWide>
__device__ __forceinline__ unsigned dequantize2(unsigned short pair, float scale) {
  const unsigned halves = kFp8 == Fp8::kE4M3 ? e4m3x2_to_half2(pair) : e5m2x2_to_half2(pair);
  const float low = multiply_to_odd(half_bits_to_float(static_cast<unsigned short>(halves)), scale);
  const float high = multiply_to_odd(half_bits_to_float(static_cast<unsigned short>(halves >> 16)), scale);
  unsigned out;
  if (kWide == Wide::kHalf) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  }
  return out;
}

template <Fp8 kFp8, Wide kWide>
struct Dequantize {
  using In = unsigned char;
  using Out = unsigned short;
  static constexpr bool kScaled = true;
  static __device__ __forceinline__ Out convert(In value, float scale) {
    return static_cast<Out>(dequantize2<kFp8, kWide>(value, scale));
  }
};

template <Fp8 kFp8, Wide kWide>
struct Dequantize8 {
  using In = uint2;
  using Out = uint4;
  static constexpr bool kScaled = true;
  static __device__ __forceinline__ Out convert(In value, float scale) {
    return make_uint4(dequantize2<kFp8, kWide>(static_cast<unsigned short>(value.x), scale),
                      dequantize2<kFp8, kWide>(static_cast<unsigned short>(value.x >> 16), scale),
                      dequantize2<kFp8, kWide>(static_cast<unsigned short>(value.y), scale),
                      dequantize2<kFp8, kWide>(static_cast<unsigned short>(value.y >> 16), scale));
  }
};

// ---- Paged caches ----------------------------------------------------------------------------------------------------

#ifndef THREADS
#define THREADS 64
#endif
constexpr int kThreads = THREADS;  // kernels/gather.py launches this many

// Every member is 8 bytes wide; kernels/gather.py packs them in this order. Strides and sizes in bytes unless noted.
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

// The request of a row: the last one with cu_seqlens_k[request] <= row.
__device__ __forceinline__ int find_request(const PagedArgs& a, long long row) {
  int request = 0, above = static_cast<int>(a.num_reqs);
  while (above - request > 1) {
    const int middle = (request + above) >> 1;
    if (__ldg(a.cu_seqlens_k + middle) <= row) {
      request = middle;
    } else {
      above = middle;
    }
  }
  return request;
}

// The same by a whole warp, 32 bounds at a time: for 4,096 requests 3 loads wait for each other, not 12.
__device__ __forceinline__ int find_request_by_warp(const PagedArgs& a, long long row, int lane) {
  int request = 0, above = static_cast<int>(a.num_reqs);
  while (above - request > 1) {
    const int step = (above - request + kWarp - 1) / kWarp;
    const int probe = request + lane * step;
    const bool starts_before = probe < above && __ldg(a.cu_seqlens_k + probe) <= row;
    const unsigned before = __ballot_sync(kAllLanes, starts_before) | 1;
    request += (31 - __clz(before)) * step;
    above = min(request + step, above);
  }
  return request;
}

// Byte offset in either cache of the token that belongs in row `row`, or kNowhere.
__device__ __forceinline__ long long find_token(const PagedArgs& a, int request, long long row) {
  const long long position = row - __ldg(a.cu_seqlens_k + request) + __ldg(a.seq_starts + request);
  if (position < 0 || position >= a.max_blocks * a.block_size) return kNowhere;
  const long long logical_block = divide(position, a.by_block_size, a.block_size);
  const int* const table = static_cast<const int*>(a.rows) + request * a.table_stride;
  const long long block = __ldg(table + logical_block);
  if (block < 0 || block >= a.num_blocks) return kNowhere;
  return block * a.block_stride + (position - logical_block * a.block_size) * a.token_stride;
}

// A block writes a tile of kThreads * kLoads vectors, each thread kLoads of them, all loads before the first store.
template <typename Convert, bool kTable, int kLoads>
__device__ __forceinline__ void gather(const PagedArgs& a) {
  using In = typename Convert::In;
  using Out = typename Convert::Out;
  constexpr int kTile = kThreads * kLoads;
  __shared__ long long sources[kTable ? kTile : 1];  // of the rows a tile touches, at most one a vector

  const unsigned token_vecs = static_cast<unsigned>(a.token_vecs);
  const unsigned run_vecs = static_cast<unsigned>(a.run_vecs);
  long long num_rows = a.num_rows;
  if (kTable) num_rows = min(num_rows, static_cast<long long>(__ldg(a.cu_seqlens_k + a.num_reqs)));
  const long long vecs = num_rows * token_vecs;

  const long long tile = static_cast<long long>(blockIdx.x) * kTile;
  if (tile >= vecs) return;
  const long long first_row = divide(tile, a.by_token_vecs, token_vecs);
  const unsigned skip = static_cast<unsigned>(tile - first_row * token_vecs);
  const unsigned count = static_cast<unsigned>(min(static_cast<long long>(kTile), vecs - tile));

  if (kTable) {
    const unsigned tile_rows = divide(skip + count - 1, a.by_token_vecs) + 1;
    if (tile_rows <= kThreads / kWarp) {
      const unsigned warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
      if (warp < tile_rows) {
        const int request = find_request_by_warp(a, first_row + warp, lane);
        if (lane == 0) sources[warp] = find_token(a, request, first_row + warp);
      }
    } else {
      for (unsigned i = threadIdx.x; i < tile_rows; i += kThreads) {
        sources[i] = find_token(a, find_request(a, first_row + i), first_row + i);
      }
    }
    __syncthreads();
  }

  In values[kLoads];
  float scales[kLoads];
  char* to[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const unsigned index = i * kThreads + threadIdx.x;
    to[i] = nullptr;
    if (index < count) {
      const unsigned row = divide(skip + index, a.by_token_vecs);
      const long long source =
          kTable ? sources[row] : find_slot(a, read_slot(a.rows, a.slots_are_64_bit, first_row + row));
      if (source != kNowhere) {
        const unsigned within = skip + index - row * token_vecs;
        unsigned run = divide(within, a.by_run_vecs);
        const unsigned vec = within - run * run_vecs;
        const bool in_value = run >= a.runs;
        if (in_value) run -= static_cast<unsigned>(a.runs);
        const char* const from = (in_value ? a.value_cache : a.key_cache) + source + run * a.run_stride;
        values[i] = __ldcg(reinterpret_cast<const In*>(from) + vec);  // read once: past L1
        if (Convert::kScaled) scales[i] = read_scale(in_value ? a.value_scale : a.key_scale, a.scale_stride, run);
        char* const out = (in_value ? a.value : a.key) + (first_row + row) * a.out_token_stride;
        to[i] = out + run * a.out_run_stride + vec * sizeof(Out);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (to[i] != nullptr) *reinterpret_cast<Out*>(to[i]) = Convert::convert(values[i], scales[i]);
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
  long long head_group;
};

#ifndef CLASSIC_WARPS
#define CLASSIC_WARPS 8
#endif
constexpr int kClassicTokens = CLASSIC_WARPS;  // a thread block's, a warp each
constexpr int kClassicThreads = kClassicTokens * kWarp;

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

// A thread block writes kClassicTokens tokens of one head.
//
// A chunk of 16 bytes holds x elements of one token in K, but one element of x tokens in V: a warp reads whole chunks
// of V, neighbours in memory, and picks from each the elements it was sent for. Consecutive tokens out of one chunk
// (a segment: whole pages are made of them) share the reads, and their warps share the dimensions.
template <typename Convert>
__device__ __forceinline__ void gather_classic(const ScatteredArgs& a) {
  using In = typename Convert::In;
  using Out = typename Convert::Out;
  constexpr unsigned kX = 16 / sizeof(In);

  const unsigned tiles = static_cast<unsigned>((a.num_rows + kClassicTokens - 1) / kClassicTokens);
  const unsigned group_heads = static_cast<unsigned>(a.head_group);
  const unsigned group = blockIdx.x / (tiles * group_heads);
  const unsigned in_group = blockIdx.x - group * tiles * group_heads;
  const unsigned heads_here = min(group_heads, static_cast<unsigned>(a.num_heads) - group * group_heads);
  const unsigned tile_index = in_group / heads_here;
  const unsigned head = group * group_heads + in_group - tile_index * heads_here;
  const long long tile = static_cast<long long>(tile_index) * kClassicTokens;
  const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;

  // Lane t holds where token t of the tile is.
  const unsigned token = lane % kClassicTokens;
  long long block = kNowhere;
  unsigned offset = 0;
  if (tile + token < a.num_rows) {
    const long long slot = read_slot(a.slots, a.slots_are_64_bit, tile + token);
    if (slot >= 0 && slot < a.num_slots) {
      block = slot >> 31 ? slot / a.block_size : static_cast<unsigned>(slot) / static_cast<unsigned>(a.block_size);
      offset = static_cast<unsigned>(slot - block * a.block_size);
    }
  }
  const long long page_chunk = block * ((a.block_size + kX - 1) / kX) + offset / kX;
  const long long before = __shfl_up_sync(kAllLanes, page_chunk, 1);
  const bool starts = token == 0 || block == kNowhere || page_chunk != before;
  const unsigned all_starts = __ballot_sync(kAllLanes, starts) & ((1ull << kClassicTokens) - 1);

  const unsigned head_size = static_cast<unsigned>(a.head_size);
  if (block != kNowhere) {
    const float scale = Convert::kScaled ? read_scale(a.key_scale, a.scale_stride, head) : 1.0f;
    const char* const from = a.key_cache + block * a.key_block_stride + head * a.key_head_stride +
                             offset * a.key_token_stride;
    char* const to = a.key + (tile + token) * a.key_out_token_stride + head * a.key_out_head_stride;
#pragma unroll 1
    for (unsigned chunk = threadIdx.x / kClassicTokens; chunk < head_size / kX; chunk += kClassicThreads / kClassicTokens) {
      const uint4 elements = __ldg(reinterpret_cast<const uint4*>(from + chunk * a.key_chunk_stride));
      convert_chunk<Convert>(to + chunk * kX * sizeof(Out), elements, scale);
    }
  }

  const unsigned first = 31 - __clz(all_starts & (2u * (1u << warp) - 1));  // of the segment this warp's token is in
  const unsigned later = all_starts & ~(2u * (1u << warp) - 1);
  const unsigned end = later ? __ffs(later) - 1 : kClassicTokens;
  const long long segment_block = __shfl_sync(kAllLanes, block, first);
  const unsigned segment_offset = __shfl_sync(kAllLanes, offset, first);
  if (segment_block == kNowhere) return;
  const float scale = Convert::kScaled ? read_scale(a.value_scale, a.scale_stride, head) : 1.0f;
  const char* const from = a.value_cache + segment_block * a.value_block_stride + head * a.value_head_stride +
                           segment_offset / kX * 16;
  char* const to = a.value + tile * a.value_out_token_stride + head * a.value_out_head_stride;
  constexpr unsigned kLoads = 4;
  const unsigned step = (end - first) * kWarp;
  for (unsigned dim = (warp - first) * kWarp + lane; __any_sync(kAllLanes, dim < head_size); dim += kLoads * step) {
    uint4 chunks[kLoads];
#pragma unroll
    for (unsigned i = 0; i < kLoads; ++i) {
      if (dim + i * step < head_size) {
        chunks[i] = __ldg(reinterpret_cast<const uint4*>(from + (dim + i * step) * a.value_dim_stride));
      }
    }
    for (unsigned t = first; t < end; ++t) {
      const unsigned element = __shfl_sync(kAllLanes, offset, t) % kX;
#pragma unroll
      for (unsigned i = 0; i < kLoads; ++i) {
        if (dim + i * step < head_size) {
          Out* const row = reinterpret_cast<Out*>(to + t * a.value_out_token_stride);
          row[dim + i * step] = Convert::convert(element_of<In>(chunks[i], element), scale);
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

// ---- Entry points ----------------------------------------------------------------------------------------------------

#define PAGED(NAME, CONVERT, LOADS)                                                                          \
  extern "C" __global__ void __launch_bounds__(kThreads) gather_slots_##NAME##_##LOADS(const PagedArgs a) {  \
    gather<CONVERT, false, LOADS>(a);                                                                        \
  }                                                                                                          \
  extern "C" __global__ void __launch_bounds__(kThreads) gather_table_##NAME##_##LOADS(const PagedArgs a) {  \
    gather<CONVERT, true, LOADS>(a);                                                                         \
  }
#define SCATTERED(NAME, CONVERT)                                                                             \
  extern "C" __global__ void __launch_bounds__(kClassicThreads) gather_classic_##NAME(const ScatteredArgs a) { \
    gather_classic<CONVERT>(a);                                                                              \
  }                                                                                                          \
  extern "C" __global__ void gather_elements_##NAME(const ScatteredArgs a) { gather_elements<CONVERT>(a); }

// Copies, by the bytes of a vector or an element: pointers, strides and runs must be multiples of it.
PAGED(16, Copy<uint4>, 1)
PAGED(16, Copy<uint4>, 2)
PAGED(16, Copy<uint4>, 4)
PAGED(8, Copy<uint2>, 4)
PAGED(4, Copy<unsigned int>, 4)
PAGED(2, Copy<unsigned short>, 4)
PAGED(1, Copy<unsigned char>, 4)
SCATTERED(4, Copy<unsigned int>)
SCATTERED(2, Copy<unsigned short>)
SCATTERED(1, Copy<unsigned char>)

#define DEQUANTIZE(NAME, FP8, WIDE)                          \
  using NAME##_one = Dequantize<Fp8::FP8, Wide::WIDE>;       \
  using NAME##_eight = Dequantize8<Fp8::FP8, Wide::WIDE>;    \
  PAGED(NAME##_8, NAME##_eight, 1)                           \
  PAGED(NAME##_8, NAME##_eight, 4)                           \
  PAGED(NAME##_1, NAME##_one, 4)                             \
  SCATTERED(NAME, NAME##_one)
DEQUANTIZE(e4m3_float16, kE4M3, kHalf)
DEQUANTIZE(e4m3_bfloat16, kE4M3, kBFloat16)
DEQUANTIZE(e5m2_float16, kE5M2, kHalf)
DEQUANTIZE(e5m2_bfloat16, kE5M2, kBFloat16)
