// archs: 80 89 90a 100 120
//
// Gathers the paged KV cache of a batch into one contiguous buffer: row t of `out` becomes a copy of the
// K|V row of token t, request after request. Bytes are copied, so every dtype takes the same path.
//
// Work is cut by bytes: a tile is the same number of bytes of `out` whoever they belong to, so one request of
// a million tokens and a thousand requests of a thousand keep the GPU equally busy. A block first finds the
// source of every token in its tile (search in cu_seqlens_k, then the block table), then each thread
// moves kLoads vectors, all loads before the first store. Tiles are small, 4 KiB at 16 bytes a vector: the
// narrower the stretch of memory that all blocks of a moment touch, the better DRAM keeps its rows open.
//
// A token whose block is not in the cache, or past the end of its row of the table, is never read; its row
// of `out` stays as it was.

constexpr int kThreads = 64;   // gather.py launches this many
constexpr int kLoads = 4;      // vectors a thread has in flight
constexpr int kTile = kThreads * kLoads;
constexpr int kWarp = 32;

// Every member is 8 bytes wide; gather.py packs them in this order. Strides and sizes in bytes.
struct Args {
  const char* cache;
  char* out;
  const int* block_table;
  const int* cu_seqlens_k;
  const int* seq_starts;
  long long num_reqs;
  long long max_blocks;
  long long table_stride;  // in entries
  long long num_blocks;
  long long block_size;  // tokens a block
  long long block_stride;
  long long token_stride;
  long long run_stride;  // from one run of a token to its next
  long long run_bytes;   // contiguous bytes of a token in the cache: all its heads, or one
  long long runs;        // such runs a token
  long long out_rows;
};

constexpr long long kNowhere = -1;

// The request of a row: the last one with cu_seqlens_k[request] <= row.
__device__ __forceinline__ int find_request(const Args& a, long long row) {
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
__device__ __forceinline__ int find_request_by_warp(const Args& a, long long row, int lane) {
  int request = 0, above = static_cast<int>(a.num_reqs);
  while (above - request > 1) {
    const int step = (above - request + kWarp - 1) / kWarp;
    const int probe = request + lane * step;
    const bool starts_before = probe < above && __ldg(a.cu_seqlens_k + probe) <= row;
    const unsigned before = __ballot_sync(0xffffffffu, starts_before) | 1;
    request += (31 - __clz(before)) * step;
    above = min(request + step, above);
  }
  return request;
}

// Byte offset in the cache of the token that belongs in row `row` of out, or kNowhere.
__device__ __forceinline__ long long find_source(const Args& a, int request, long long row) {
  const long long position = row - __ldg(a.cu_seqlens_k + request) + __ldg(a.seq_starts + request);
  if (position < 0 || position >= a.max_blocks * a.block_size) return kNowhere;
  const long long logical_block = position / a.block_size;
  const long long block = __ldg(a.block_table + request * a.table_stride + logical_block);
  if (block < 0 || block >= a.num_blocks) return kNowhere;
  return block * a.block_stride + (position - logical_block * a.block_size) * a.token_stride;
}

template <typename Vec>
__device__ __forceinline__ void gather(const Args& a) {
  __shared__ long long sources[kTile];  // of the rows a tile touches, at most one a vector

  const unsigned run_vecs = static_cast<unsigned>(a.run_bytes / sizeof(Vec));
  const unsigned token_vecs = run_vecs * static_cast<unsigned>(a.runs);
  const long long rows = min(static_cast<long long>(__ldg(a.cu_seqlens_k + a.num_reqs)), a.out_rows);
  const long long vecs = rows * token_vecs;

  const long long tile = static_cast<long long>(blockIdx.x) * kTile;
  if (tile >= vecs) return;
  const long long first_row = tile / token_vecs;
  const unsigned skip = static_cast<unsigned>(tile - first_row * token_vecs);
  const unsigned count = static_cast<unsigned>(min(static_cast<long long>(kTile), vecs - tile));
  const unsigned tile_rows = (skip + count - 1) / token_vecs + 1;

  if (tile_rows <= kThreads / kWarp) {
    const unsigned warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    if (warp < tile_rows) {
      const int request = find_request_by_warp(a, first_row + warp, lane);
      if (lane == 0) sources[warp] = find_source(a, request, first_row + warp);
    }
  } else {
    for (unsigned i = threadIdx.x; i < tile_rows; i += kThreads) {
      sources[i] = find_source(a, find_request(a, first_row + i), first_row + i);
    }
  }
  __syncthreads();

  Vec values[kLoads];
  bool found[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const unsigned index = i * kThreads + threadIdx.x;
    found[i] = false;
    if (index < count) {
      const unsigned row = (skip + index) / token_vecs;
      const unsigned within = skip + index - row * token_vecs;
      const unsigned run = a.runs == 1 ? 0 : within / run_vecs;
      const long long source = sources[row];
      if (source != kNowhere) {
        const char* from = a.cache + source + run * a.run_stride + (within - run * run_vecs) * sizeof(Vec);
        values[i] = __ldcg(reinterpret_cast<const Vec*>(from));  // read once: past L1
        found[i] = true;
      }
    }
  }
  Vec* const to = reinterpret_cast<Vec*>(a.out) + tile + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (found[i]) to[i * kThreads] = values[i];
  }
}

// One entry point a vector width in bytes: pointers, strides and run_bytes must be multiples of it.
#define ENTRY(BYTES, VEC) \
  extern "C" __global__ void __launch_bounds__(kThreads) gather_paged_kv_##BYTES(const Args a) { gather<VEC>(a); }
ENTRY(16, uint4)
ENTRY(8, uint2)
ENTRY(4, unsigned int)
ENTRY(2, unsigned short)
ENTRY(1, unsigned char)
