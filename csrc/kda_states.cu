// archs: 80 89 90a 100 120
//
// Moves the recurrent states of a batch of sequences out of the engine's pool and back. The state of a sequence is a
// dense run of bytes, at a row of the pool; rows may lie apart. Rows that are not in the pool are neither read nor
// written.

namespace {

constexpr int kThreads = 256;
constexpr int kLoads = 4;  // vectors that a thread moves
constexpr int kPart = kThreads * kLoads;

// Every member is 8 bytes wide; kernels/states.py packs them in this order. A vector is 16 bytes.
struct Args {
  uint4* states;                // [sequences], dense
  uint4* pool;                  // [rows]
  const void* rows;             // of the pool, one a sequence
  const bool* has_state;        // one a sequence, unused by the scatter
  long long rows_are_64_bit;
  long long num_rows;           // of the pool
  long long row_stride;         // of the pool, in vectors
  long long row_vectors;        // vectors a state
  long long parts;              // thread blocks a state
};

// A kernel may be launched while the one before it in the stream still runs, and touches memory only after this.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ long long read_row(const Args& args, long long sequence) {
  return args.rows_are_64_bit ? static_cast<const long long*>(args.rows)[sequence]
                              : static_cast<const int*>(args.rows)[sequence];
}

}  // namespace

// The state of each sequence, zeros for one that has none yet.
extern "C" __global__ void __launch_bounds__(kThreads) gather_states(Args args) {
  wait_for_previous_kernel();
  const long long sequence = blockIdx.x / args.parts;
  const long long first = (blockIdx.x % args.parts) * kPart + threadIdx.x;
  const long long row = read_row(args, sequence);
  const bool there = args.has_state[sequence] && row >= 0 && row < args.num_rows;
  const uint4* from = args.pool + row * args.row_stride;
  uint4* to = args.states + sequence * args.row_vectors;
  uint4 moved[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const long long at = first + i * kThreads;
    moved[i] = there && at < args.row_vectors ? from[at] : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const long long at = first + i * kThreads;
    if (at < args.row_vectors) to[at] = moved[i];
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) scatter_states(Args args) {
  wait_for_previous_kernel();
  const long long sequence = blockIdx.x / args.parts;
  const long long first = (blockIdx.x % args.parts) * kPart + threadIdx.x;
  const long long row = read_row(args, sequence);
  if (row < 0 || row >= args.num_rows) return;
  const uint4* from = args.states + sequence * args.row_vectors;
  uint4* to = args.pool + row * args.row_stride;
  uint4 moved[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const long long at = first + i * kThreads;
    if (at < args.row_vectors) moved[i] = from[at];
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const long long at = first + i * kThreads;
    if (at < args.row_vectors) to[at] = moved[i];
  }
}
