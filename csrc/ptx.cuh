// Instructions of Hopper that C++ has no words for, each a function. Shared memory is addressed by generic pointers.
//
// A test replaces this file by one that does the same on the host: see tests/support/emulated_gpu.h.

#ifndef VLLM_KDA_PTX_CUH
#define VLLM_KDA_PTX_CUH

namespace ptx {

using u32 = unsigned int;
using u64 = unsigned long long;

// The dynamic shared memory of the block.
__device__ __forceinline__ char* shared_memory() {
  extern __shared__ __align__(128) char bytes[];
  return bytes;
}

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Four 8x8 matrices of 16-bit numbers. Lane 8m + r gives the address of row r of matrix m; register m of lane
// 4r + c holds elements 2c and 2c + 1 of row r of it.
__device__ __forceinline__ void load_matrices(u32 (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}

// The same with each matrix transposed.
__device__ __forceinline__ void load_transposed(u32 (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}

__device__ __forceinline__ void store_transposed(void* row, const u32 (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared_address(row)),
               "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
}

// A matrix as load_matrices gives it, transposed.
__device__ __forceinline__ u32 transpose(u32 matrix) {
  u32 transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(matrix));
  return transposed;
}

// sum += a b, or sum = a b: sum [16, 8], a [16, 16], b [16, 8]. Lane 4r + c holds of sum rows r and r + 8, columns 2c and 2c + 1;
// of a four pairs, rows r, r + 8, r, r + 8, columns 2c (+1), 2c, 2c + 8, 2c + 8; of b column r, rows 2c (+1), 2c + 8.
__device__ __forceinline__ void mma_bf16(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1, bool from_zero = false) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%11,%12,%13};"
      : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(from_zero ? 0.f : sum[0]),
        "f"(from_zero ? 0.f : sum[1]), "f"(from_zero ? 0.f : sum[2]), "f"(from_zero ? 0.f : sum[3]));
}

__device__ __forceinline__ void mma_f16(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1, bool from_zero = false) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%11,%12,%13};"
      : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(from_zero ? 0.f : sum[0]),
        "f"(from_zero ? 0.f : sum[1]), "f"(from_zero ? 0.f : sum[2]), "f"(from_zero ? 0.f : sum[3]));
}

// Two numbers rounded to nearest, the first in the low half.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ u32 pack_f16(float low, float high) {
  u32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ float low_bf16(u32 packed) { return __uint_as_float(packed << 16); }
__device__ __forceinline__ float high_bf16(u32 packed) { return __uint_as_float(packed & 0xffff0000u); }

// To within 2^-22, as the others.
__device__ __forceinline__ float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_root(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ u32 warp_max(u32 x) { return __reduce_max_sync(0xffffffffu, x); }
__device__ __forceinline__ u32 warp_ballot(bool x) { return __ballot_sync(0xffffffffu, x); }
__device__ __forceinline__ float warp_read(float x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
__device__ __forceinline__ void warp_sync() { __syncwarp(); }
__device__ __forceinline__ void block_sync() { __syncthreads(); }

// The same, of which the compiler knows nothing: it works out no address from it before it comes here, and does not
// take it apart.
template <class T>
__device__ __forceinline__ T* only_here(T* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}
__device__ __forceinline__ int only_here(int number) {
  asm volatile("" : "+r"(number));
  return number;
}

// Some of the block's threads, whole warps.
__device__ __forceinline__ void barrier(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// The same; whether all of them say so.
__device__ __forceinline__ bool barrier_all(int number, int threads, bool so) {
  u32 all;
  asm volatile(
      "{\n"
      ".reg .pred one, every;\n"
      "setp.ne.u32 one, %1, 0;\n"
      "bar.red.and.pred every, %2, %3, one;\n"
      "selp.u32 %0, 1, 0, every;\n"
      "}\n"
      : "=r"(all)
      : "r"(u32(so)), "r"(number), "r"(threads)
      : "memory");
  return all;
}

// Barriers in shared memory. A phase ends when all have arrived.
__device__ __forceinline__ void init_barrier(u64* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// One lane arrives for its warp. compute-sanitizer's racecheck sees what threads did before only of those that arrive
// themselves: for it, all do.
#ifdef VLLM_KDA_ALL_ARRIVE
constexpr int kArrivalsOfWarp = 32;
#else
constexpr int kArrivalsOfWarp = 1;
#endif
__device__ __forceinline__ void arrive_as_warp(u64* barrier, int lane) {
  if (kArrivalsOfWarp == 1) __syncwarp();
  if (kArrivalsOfWarp == 32 || lane == 0) arrive(barrier);
}

// Until the phase of this parity has ended.
__device__ __forceinline__ void wait(u64* barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// 16 bytes to shared memory, zeros where there is nothing to read.
__device__ __forceinline__ void copy_async(void* to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(there ? 16 : 0)
               : "memory");
}

// This thread arrives when its copies so far have.
__device__ __forceinline__ void arrive_after_copies(u64* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// A kernel may be launched while the one before it in the stream still runs, and touches memory only after this.
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The next one may be launched once all blocks have said so, where there is room beside them.
__device__ __forceinline__ void launch_next_kernel() { asm volatile("griddepcontrol.launch_dependents;"); }

// Move registers between the groups of four warps of a block. Compiled for sm_90 without its `a`, this does nothing.
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

}  // namespace ptx

#endif  // VLLM_KDA_PTX_CUH
