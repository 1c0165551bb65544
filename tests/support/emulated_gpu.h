// A GPU for one thread block at a time, on the host: enough to run the kernels of csrc/ compiled by g++.
//
// Every thread is a fiber. Words between threads (csrc/ptx.cuh, whose place this file takes) let others run, in an
// order drawn from a seed, so that a missing barrier shows; copies into shared memory arrive late, and shared memory
// begins as NaN. Lanes of a warp must meet in the same instruction, or the run ends with a message.

#ifndef VLLM_KDA_PTX_CUH
#define VLLM_KDA_PTX_CUH

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

using std::max;
using std::min;

struct Index {
  unsigned x;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <class To, class From>
inline To bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}
inline float __uint_as_float(unsigned x) { return bits<float>(x); }
inline unsigned __float_as_uint(float x) { return bits<unsigned>(x); }
inline float __int_as_float(int x) { return bits<float>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }

namespace emulated {

constexpr int kLanes = 32, kMostThreads = 1024, kSharedBytes = 232448, kStackBytes = 256 << 10;

struct Meeting {  // of the lanes of a warp: the numbers that each brings
  const char* name[2];
  unsigned brought[2][kLanes][8];
  const void* address[2][kLanes];
  long arrived[2];
};
struct Fiber {
  ucontext_t context;
  bool done;
  bool (*ready)(const void* what, long than);  // null: can run
  const void* what;
  long than;
  long meetings;
};
struct Copy {
  void* to;
  const void* from;
};
struct Arrival {
  std::vector<Copy> copies;
  unsigned long long* barrier;
};

inline Fiber fibers[kMostThreads];
inline Meeting meetings[kMostThreads / kLanes];
inline long barrier_arrivals[17], barrier_phases[17];  // the last is __syncthreads'
inline std::vector<Copy> copies[kMostThreads];
inline std::vector<Arrival> arrivals;
inline ucontext_t scheduler;
inline int current, num_threads;
inline Index block;
inline std::mt19937 dice;
alignas(1024) inline char shared[kSharedBytes];

[[noreturn]] inline void fail(const char* why) {
  std::fprintf(stderr, "emulated GPU: block %u, thread %d: %s\n", block.x, current, why);
  std::abort();
}

inline void wait_until(bool (*ready)(const void*, long), const void* what, long than) {
  Fiber& fiber = fibers[current];
  fiber.ready = ready, fiber.what = what, fiber.than = than;
  const int self = current;
  swapcontext(&fiber.context, &scheduler);
  current = self;
}

// Each lane brings numbers and an address, and leaves when all have; it may read them until it meets them again.
inline int meet(const char* name, const unsigned* brought, int count, const void* address) {
  Fiber& fiber = fibers[current];
  Meeting& meeting = meetings[current / kLanes];
  const int at = fiber.meetings % 2;
  const long all = kLanes * (fiber.meetings / 2 + 1);
  ++fiber.meetings;
  if (meeting.arrived[at] == all - kLanes) meeting.name[at] = name;
  if (meeting.name[at] != name && std::strcmp(meeting.name[at], name)) fail("lanes meet in different instructions");
  std::copy(brought, brought + count, meeting.brought[at][current % kLanes]);
  meeting.address[at][current % kLanes] = address;
  ++meeting.arrived[at];
  wait_until([](const void* arrived, long than) { return *static_cast<const long*>(arrived) >= than; },
             &meeting.arrived[at], all);
  return at;
}

inline void land(const Arrival& arrival);

struct Blob {
  long long words[96];
};
inline void (*entry)(Blob);
inline Blob arguments;

inline void run_fiber() {
  const int self = current;
  entry(arguments);
  fibers[self].done = true;
}

inline void run_block() {
  std::memset(shared, 0xff, sizeof shared);
  std::memset(meetings, 0, sizeof meetings);
  std::fill(std::begin(barrier_arrivals), std::end(barrier_arrivals), 0);
  std::fill(std::begin(barrier_phases), std::end(barrier_phases), 0);
  arrivals.clear();
  static char* const stacks = static_cast<char*>(mmap(nullptr, size_t{kMostThreads} * kStackBytes,
                                                      PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  for (int i = 0; i < num_threads; ++i) {
    Fiber& fiber = fibers[i];
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks + size_t(i) * kStackBytes;
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, run_fiber, 0);
    fiber.done = false, fiber.ready = nullptr, fiber.meetings = 0;
    copies[i].clear();
  }
  std::vector<int> warps(num_threads / kLanes);
  for (size_t i = 0; i < warps.size(); ++i) warps[i] = static_cast<int>(i);
  for (int idle = 0; idle < 2;) {
    bool ran = false, left = false;
    std::shuffle(warps.begin(), warps.end(), dice);
    for (int warp : warps) {
      if (dice() % 3 == 0 && idle == 0) {  // this warp is slow today
        for (int i = 0; i < kLanes; ++i) left |= !fibers[warp * kLanes + i].done;
        continue;
      }
      const int first = static_cast<int>(dice() % kLanes);
      const int count = idle == 0 && dice() % 4 == 0 ? static_cast<int>(dice() % kLanes) : kLanes;  // or some lanes are
      for (int i = first; i < first + kLanes; ++i) {
        Fiber& fiber = fibers[warp * kLanes + i % kLanes];
        if (fiber.done) continue;
        left = true;
        if (i >= first + count) continue;
        if (fiber.ready && !fiber.ready(fiber.what, fiber.than)) continue;
        fiber.ready = nullptr;
        current = warp * kLanes + i % kLanes;
        swapcontext(&scheduler, &fiber.context);
        ran = true;
      }
    }
    while (!arrivals.empty() && (!ran || dice() % 4 == 0)) {
      const size_t at = dice() % arrivals.size();
      land(arrivals[at]);
      arrivals.erase(arrivals.begin() + at);
      ran = true;
    }
    if (!left) return;
    idle = ran ? 0 : idle + 1;
  }
  fail("all threads wait");
}

inline float f16(unsigned x) { return static_cast<float>(bits<_Float16>(static_cast<unsigned short>(x))); }
inline float bf16(unsigned x) { return bits<float>(x << 16); }
inline unsigned to_bf16(float x) {
  const unsigned word = bits<unsigned>(x);
  if (std::isnan(x)) return 0x7fff;
  return (word + 0x7fff + (word >> 16 & 1)) >> 16;
}

template <class Wide>
inline void multiply(const char* name, float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, bool from_zero,
                     Wide wide) {
  const unsigned brought[6] = {a[0], a[1], a[2], a[3], b0, b1};
  const auto& lanes = meetings[current / kLanes].brought[meet(name, brought, 6, nullptr)];
  const int row = current % kLanes / 4, column = 2 * (current % 4);
  for (int i = 0; i < 4; ++i) {
    double total = from_zero ? 0 : sum[i];
    for (int k = 0; k < 16; ++k) {
      const unsigned x = lanes[4 * row + k % 8 / 2][i / 2 + k / 8 * 2] >> k % 2 * 16;
      const unsigned y = lanes[4 * (column + i % 2) + k % 8 / 2][4 + k / 8] >> k % 2 * 16;
      total += double(wide(x & 0xffff)) * wide(y & 0xffff);
    }
    sum[i] = static_cast<float>(total);
  }
}

}  // namespace emulated

#define threadIdx (Index{static_cast<unsigned>(emulated::current)})
#define blockIdx (emulated::block)

namespace ptx {

using u32 = unsigned int;
using u64 = unsigned long long;

inline char* shared_memory() { return emulated::shared; }

inline const void* const* rows_of(const char* name, const void* row) {
  if (reinterpret_cast<uintptr_t>(row) % 16) emulated::fail("a row of a matrix is not aligned");
  auto& meeting = emulated::meetings[emulated::current / 32];
  return meeting.address[emulated::meet(name, nullptr, 0, row)];
}

inline void load_matrices(u32 (&to)[4], const void* row) {
  const auto rows = rows_of("load_matrices", row);
  const int lane = emulated::current % 32;
  for (int m = 0; m < 4; ++m) to[m] = static_cast<const u32*>(rows[8 * m + lane / 4])[lane % 4];
}

inline void load_transposed(u32 (&to)[4], const void* row) {
  const auto rows = rows_of("load_transposed", row);
  const int lane = emulated::current % 32;
  for (int m = 0; m < 4; ++m) {
    const auto at = [&](int r) { return u32(static_cast<const uint16_t*>(rows[8 * m + r])[lane / 4]); };
    to[m] = at(2 * (lane % 4)) | at(2 * (lane % 4) + 1) << 16;
  }
}

inline void store_transposed(void* row, const u32 (&from)[4]) {
  const auto rows = rows_of("store_transposed", row);
  const int lane = emulated::current % 32;
  for (int m = 0; m < 4; ++m) {
    for (int i = 0; i < 2; ++i) {
      auto to = static_cast<uint16_t*>(const_cast<void*>(rows[8 * m + 2 * (lane % 4) + i]));
      to[lane / 4] = static_cast<uint16_t>(from[m] >> 16 * i);
    }
  }
}

inline u32 transpose(u32 matrix) {
  const auto& lanes = emulated::meetings[emulated::current / 32]
                          .brought[emulated::meet("transpose", &matrix, 1, nullptr)];
  const int lane = emulated::current % 32;
  u32 transposed = 0;
  for (int i = 0; i < 2; ++i) {  // row lane / 4 of what was column lane / 4
    const u32 pair = lanes[4 * (2 * (lane % 4) + i) + lane / 8][0];
    transposed |= (pair >> lane / 4 % 2 * 16 & 0xffff) << 16 * i;
  }
  return transposed;
}

inline void mma_bf16(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1, bool from_zero = false) {
  emulated::multiply("mma_bf16", sum, a, b0, b1, from_zero, emulated::bf16);
}
inline void mma_f16(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1, bool from_zero = false) {
  emulated::multiply("mma_f16", sum, a, b0, b1, from_zero, emulated::f16);
}

inline u32 pack_bf16(float low, float high) { return emulated::to_bf16(low) | emulated::to_bf16(high) << 16; }
inline u32 pack_f16(float low, float high) {
  return bits<uint16_t>(static_cast<_Float16>(low)) | u32(bits<uint16_t>(static_cast<_Float16>(high))) << 16;
}
inline float low_bf16(u32 packed) { return bits<float>(packed << 16); }
inline float high_bf16(u32 packed) { return bits<float>(packed & 0xffff0000u); }

inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? 0.f : x; }
inline float exp2(float x) { return flushed(std::exp2(x)); }
inline float log2(float x) { return std::log2(x); }
inline float reciprocal(float x) { return flushed(1.f / x); }
inline float reciprocal_root(float x) { return flushed(1.f / std::sqrt(x)); }

inline u32 warp_max(u32 x) {
  const auto& lanes = emulated::meetings[emulated::current / 32].brought[emulated::meet("warp_max", &x, 1, nullptr)];
  for (int i = 0; i < 32; ++i) x = std::max(x, lanes[i][0]);
  return x;
}
inline u32 warp_ballot(bool x) {
  const u32 word = x;
  const auto& lanes =
      emulated::meetings[emulated::current / 32].brought[emulated::meet("warp_ballot", &word, 1, nullptr)];
  u32 all = 0;
  for (int i = 0; i < 32; ++i) all |= lanes[i][0] << i;
  return all;
}
inline float warp_read(float x, int lane) {
  const u32 word = bits<u32>(x);
  const auto& lanes =
      emulated::meetings[emulated::current / 32].brought[emulated::meet("warp_read", &word, 1, nullptr)];
  return bits<float>(lanes[lane][0]);
}
inline void warp_sync() { emulated::meet("warp_sync", nullptr, 0, nullptr); }

inline void barrier(int number, int threads) {
  long& phase = emulated::barrier_phases[number];
  const long now = phase;
  if (++emulated::barrier_arrivals[number] == threads) {
    emulated::barrier_arrivals[number] = 0;
    ++phase;
  }
  emulated::wait_until([](const void* at, long than) { return *static_cast<const long*>(at) != than; }, &phase, now);
}
template <class T>
inline T only_here(T x) {
  return x;
}
inline bool barrier_all(int number, int threads, bool so) {
  // Of each phase that begins, whether one said no; two phases back no one looks any more.
  static bool refused[17][4];
  const long phase = emulated::barrier_phases[number];
  if (emulated::barrier_arrivals[number] == 0) refused[number][phase % 4] = false;
  refused[number][phase % 4] |= !so;
  barrier(number, threads);
  return !refused[number][phase % 4];
}
inline void block_sync() { barrier(16, emulated::num_threads); }

// The first 16 bits count down from the second, bit 32 is the phase.
inline void init_barrier(u64* barrier, int arrivals) { *barrier = u64(arrivals) << 16 | u64(arrivals); }
inline void arrive(u64* barrier) {
  if ((*barrier & 0xffff) == 0 || *barrier >> 33) emulated::fail("a barrier that is none");
  if ((--*barrier & 0xffff) == 0) *barrier = (*barrier | ((*barrier >> 16) & 0xffff)) ^ (u64(1) << 32);
}
constexpr int kArrivalsOfWarp = 1;
inline void arrive_as_warp(u64* barrier, int lane) {
  warp_sync();
  if (lane == 0) arrive(barrier);
}
inline void wait(u64* barrier, u32 parity) {
  emulated::wait_until(
      [](const void* at, long than) { return long(*static_cast<const u64*>(at) >> 32 & 1) != than; }, barrier,
      long(parity));
}

inline void copy_async(void* to, const void* from, bool there) {
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % 16) emulated::fail("a copy is not aligned");
  emulated::copies[emulated::current].push_back({to, there ? from : nullptr});
}
inline void arrive_after_copies(u64* barrier) {
  emulated::arrivals.push_back({std::move(emulated::copies[emulated::current]), barrier});
  emulated::copies[emulated::current].clear();
}

inline void wait_for_previous_kernel() {}
inline void launch_next_kernel() {}
template <int kRegisters>
inline void take_registers() {}
template <int kRegisters>
inline void give_registers() {}

}  // namespace ptx

inline void emulated::land(const Arrival& arrival) {
  for (const Copy& copy : arrival.copies) {
    if (copy.from) {
      std::memcpy(copy.to, copy.from, 16);
    } else {
      std::memset(copy.to, 0, 16);
    }
  }
  ptx::arrive(arrival.barrier);
}

// Run a kernel whose one argument is a struct of 8-byte members.
extern "C" inline __attribute__((used)) void emulated_launch(void (*kernel)(emulated::Blob), unsigned blocks, int threads,
                                                             const long long* words, int count, unsigned seed) {
  emulated::entry = kernel;
  emulated::num_threads = threads;
  std::copy(words, words + count, emulated::arguments.words);
  emulated::dice.seed(seed);
  for (unsigned i = 0; i < blocks; ++i) {
    emulated::block = {i};
    emulated::run_block();
  }
}

#endif  // VLLM_KDA_PTX_CUH
