// `ops/cuda/kernels/device.cuh` for a host processor: the threads of a block are contexts that take turns, blocks run one after the
// other. Slow and exact, so that the kernels' own sources are tested where there is no GPU. Rules of the processor that it checks:
// none but those that a wrong result shows; it knows no races.
#include <math.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(16) u32x4 {
  u32 x, y, z, w;
};
struct alignas(8) u32x2 {
  u32 x, y;
};
struct alignas(16) f32x4 {
  float x, y, z, w;
};
struct Index {
  u32 x, y, z;
};

#define DEVICE static inline
#define KERNEL static void
#define SHARED static
#define DYNAMIC_SHARED(name) static __attribute__((aligned(128))) u8 name[228 << 10]
#define CONSTANT_ARGUMENT(type) const type
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

static Index threadIdx, blockIdx, blockDim, gridDim;
using std::max;
using std::min;

namespace emulation {
// A context starts a thread; from then on jumps switch, which cost no system call.
struct Thread {
  ucontext_t context;
  jmp_buf place;
  std::vector<char> stack;
  bool started = false, done = false;
  const u32* round = nullptr;  // of the barrier that it waits for, until it is no longer `since`
  u32 since = 0;
};
static ucontext_t unused;
static jmp_buf scheduler;
static std::vector<Thread> threads;
static u32 current;
static u32 arrived, generation, live;
static u32 part_arrived, part_generation;
struct Warp {
  u32 arrived = 0, generation = 0;
  u32 words[32][6];
};
static std::vector<Warp> warps;
static void (*body)();

static void wait(u32& count, u32& round, u32 expected) {
  if (++count == expected) {
    count = 0, round++;
    return;
  }
  Thread& thread = threads[current];
  thread.round = &round, thread.since = round;
  if (!_setjmp(thread.place)) _longjmp(scheduler, 1);
}
// Let others run until `round` changes.
static void give_way(const u32& round) {
  Thread& thread = threads[current];
  thread.round = &round, thread.since = round;
  if (!_setjmp(thread.place)) _longjmp(scheduler, 1);
}
static void leave() {
  threads[current].done = true;
  if (--live && arrived == live) arrived = 0, generation++;
}
static void entry() {
  body();
  leave();
  _longjmp(scheduler, 1);
}
static void resume(Thread& thread) {
  threadIdx = {current, 0, 0};
  if (_setjmp(scheduler)) return;
  if (thread.started) _longjmp(thread.place, 1);
  thread.started = true;
  setcontext(&thread.context);
}
static Warp& warp() { return warps[current / 32]; }
static void warp_barrier() { wait(warp().arrived, warp().generation, 32); }

static void run_block(u32 size) {
  if (threads.size() < size) threads.resize(size);
  warps.assign((size + 31) / 32, Warp());
  live = size, arrived = 0;
  for (u32 i = 0; i < size; i++) {
    Thread& thread = threads[i];
    thread.started = thread.done = false, thread.round = nullptr;
    thread.stack.resize(1 << 17);
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data();
    thread.context.uc_stack.ss_size = thread.stack.size();
    thread.context.uc_link = &unused;
    makecontext(&thread.context, entry, 0);
  }
  while (live)
    for (current = 0; current < size; current++) {
      Thread& thread = threads[current];
      if (!thread.done && !(thread.round && *thread.round == thread.since)) resume(thread);
    }
}

template <typename... A, size_t... I>
static void run(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
  static void (*kept)(A...);
  static void** values;
  kept = kernel, values = arguments;
  body = [] { kept(*static_cast<A*>(values[I])...); };
  for (blockIdx.z = 0; blockIdx.z < gridDim.z; blockIdx.z++)
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; blockIdx.y++)
      for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) run_block(blockDim.x);
}

template <typename... A>
static void launch(void (*kernel)(A...), const u32* grid, u32 block, void** arguments) {
  gridDim = {grid[0], grid[1], grid[2]}, blockDim = {block, 1, 1};
  run(kernel, arguments, std::index_sequence_for<A...>());
}
}  // namespace emulation

// The name under which a test calls a kernel.
#define EXPORT(name) \
  extern "C" void launch_##name(const u32* grid, u32 block, void** arguments) { emulation::launch(name, grid, block, arguments); }

DEVICE float __uint_as_float(u32 bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
DEVICE u32 bits_of(float value) {
  u32 bits;
  memcpy(&bits, &value, 4);
  return bits;
}
DEVICE float half_value(u16 bits) {
  _Float16 value;
  memcpy(&value, &bits, 2);
  return value;
}
DEVICE u16 half_bits(float value) {
  const _Float16 half = value;
  u16 bits;
  memcpy(&bits, &half, 2);
  return bits;
}
DEVICE u16 brain_bits(float value) {
  const u32 bits = bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}
template <bool F16>
DEVICE u32 pack(float low, float high) {
  return F16 ? half_bits(low) | u32(half_bits(high)) << 16 : brain_bits(low) | u32(brain_bits(high)) << 16;
}
template <bool F16>
DEVICE float low(u32 word) {
  return F16 ? half_value(u16(word)) : __uint_as_float(word << 16);
}
template <bool F16>
DEVICE float high(u32 word) {
  return F16 ? half_value(u16(word >> 16)) : __uint_as_float(word & 0xffff0000u);
}
template <bool F16>
DEVICE u32 fma2(u32 a, u32 b, u32 c) {
  return pack<F16>(low<F16>(a) * low<F16>(b) + low<F16>(c), high<F16>(a) * high<F16>(b) + high<F16>(c));
}
template <bool F16>
DEVICE float number(u32 word, int k) {
  return k & 1 ? high<F16>(word) : low<F16>(word);
}
template <bool F16>
DEVICE void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  emulation::Warp& warp = emulation::warp();
  const int lane = threadIdx.x & 31, me = emulation::current;
  u32* mine = warp.words[lane];
  for (int i = 0; i < 4; i++) mine[i] = a[i];
  mine[4] = b0, mine[5] = b1;
  emulation::warp_barrier();
  for (int i = 0; i < 4; i++) {
    const int row = (me % 32 >> 2) + 8 * (i >> 1), column = 2 * (me & 3) + (i & 1);
    for (int k = 0; k < 16; k++)
      c[i] += number<F16>(warp.words[(row & 7) * 4 + (k % 8) / 2][(row >> 3) + 2 * (k >> 3)], k) *
              number<F16>(warp.words[column * 4 + (k % 8) / 2][4 + (k >> 3)], k);
  }
  emulation::warp_barrier();
}

// The second operand of a warpgroup's product: where it is, and how its parts lie apart.
enum Arrangement { UNITS, INPUTS, COLUMNS };
struct Operand {
  const u8* first;
  u32 inputs_apart, columns_apart;
  Arrangement arrangement;
};
DEVICE Operand operand(const void* shared, u32 inputs_apart, u32 columns_apart) {
  return {static_cast<const u8*>(shared), inputs_apart, columns_apart, UNITS};
}
DEVICE Operand operand_of_inputs(const void* shared) { return {static_cast<const u8*>(shared), 0, 1024, INPUTS}; }
DEVICE Operand operand_of_columns(const void* shared, u32 slices_apart) {
  return {static_cast<const u8*>(shared), slices_apart, 1024, COLUMNS};
}
DEVICE u16 element(const Operand& b, int k, int column) {
  const u8* at = b.first;
  if (b.arrangement == UNITS) {
    at += (k >> 3) * b.inputs_apart + (column >> 3) * b.columns_apart + (column & 7) * 16 + (k & 7) * 2;
  } else {
    at += b.arrangement == INPUTS ? column * 128 + k * 2 : column / 64 * b.inputs_apart + k * 128 + column % 64 * 2;
    const u64 place = reinterpret_cast<u64>(at);
    at = reinterpret_cast<const u8*>(place ^ (place >> 7 & 7) << 4);
  }
  u16 bits;
  memcpy(&bits, at, 2);
  return bits;
}
// At once, warp by warp.
template <bool F16, bool BY_COLUMNS = false, int TILES>
DEVICE void multiply_wide(float (&c)[TILES][4], const u32 (&a)[4], Operand b) {
  emulation::Warp& warp = emulation::warp();
  const int me = emulation::current & 31;
  for (int i = 0; i < 4; i++) warp.words[me][i] = a[i];
  emulation::warp_barrier();
  for (int n = 0; n < TILES; n++)
    for (int i = 0; i < 4; i++) {
      const int row = (me >> 2) + 8 * (i >> 1), column = 8 * n + 2 * (me & 3) + (i & 1);
      for (int k = 0; k < 16; k++)
        c[n][i] += number<F16>(warp.words[(row & 7) * 4 + (k % 8) / 2][(row >> 3) + 2 * (k >> 3)], k) * low<F16>(element(b, k, column));
    }
  emulation::warp_barrier();
}
template <int REGISTERS>
DEVICE void leave_registers() {}
template <int REGISTERS>
DEVICE void take_registers() {}
DEVICE void begin_products() {}
DEVICE void end_products() {}
template <int LEFT>
DEVICE void wait_for_products() {}

// A barrier in 64 bits: how many arrivals a phase expects, how many are missing, and how many phases are over. Copies take no time.
struct Barrier {
  u16 expected, missing;
  u32 over;
};
DEVICE Barrier& barrier_at(u64* barrier) { return *reinterpret_cast<Barrier*>(barrier); }
DEVICE void init_barrier(u64* barrier, u32 arrivals) { barrier_at(barrier) = {u16(arrivals), u16(arrivals), 0}; }
DEVICE void barriers_are_ready() {}
DEVICE void arrive(u64* barrier) {
  Barrier& b = barrier_at(barrier);
  if (--b.missing == 0) b.missing = b.expected, b.over++;
}
DEVICE void expect_bytes(u64* barrier, u32) { arrive(barrier); }
DEVICE void wait_for_phase(u64* barrier, u32 phase) {
  while ((barrier_at(barrier).over & 1) == phase) emulation::give_way(barrier_at(barrier).over);
}
DEVICE void copy_bulk(void* shared, const void* global, u32 bytes, u64*) { memcpy(shared, global, bytes); }
// A tensor as `EmulatedDevice.box_map` describes it: address, sizes, bytes between neighbours (of the first dimension: 1), and the box.
struct BoxMap {
  u64 address, sizes[5], strides[5], box[5];
};
struct Corner {
  int token, slice, kind, block;
};
DEVICE void copy_box(void* shared, const BoxMap& map, const Corner& corner, u64*) {
  const u64 first[5] = {0, u64(corner.token), u64(corner.slice), u64(corner.kind), u64(corner.block)};
  for (u64 kind = 0; kind < map.box[3]; kind++)
    for (u64 s = 0; s < map.box[2]; s++)
      for (u64 t = 0; t < map.box[1]; t++) {
        const u64 at[5] = {0, first[1] + t, first[2] + s, first[3] + kind, first[4]};
        const u8* from = reinterpret_cast<const u8*>(map.address);
        bool exists = true;
        for (int d = 0; d < 5; d++) from += at[d] * map.strides[d], exists &= at[d] < map.sizes[d];
        u8* to = static_cast<u8*>(shared) + ((kind * map.box[2] + s) * map.box[1] + t) * 128;
        for (u64 unit = 0; unit < 8; unit++) {
          if (exists) memcpy(to + (unit ^ (t & 7)) * 16, from + unit * 16, 16);
          else memset(to + (unit ^ (t & 7)) * 16, 0, 16);
        }
      }
}
DEVICE u8* aligned(u8* shared, u32 bytes) { return shared + (-reinterpret_cast<u64>(shared) & (bytes - 1)); }

template <u32 MASK>
DEVICE u32 and_or(u32 a, u32 b) {
  return (a & MASK) | b;
}
DEVICE int uniform(int value) { return value; }
DEVICE u32 permute(u32 a, u32 b, u32 order) {
  const u64 both = a | u64(b) << 32;
  u32 result = 0;
  for (int i = 0; i < 4; i++) result |= u32(both >> 8 * (order >> 4 * i & 7) & 255) << 8 * i;
  return result;
}
DEVICE u32x4 load_once(const u32x4* p) { return *p; }
DEVICE u32 load_once(const u32* p) { return *p; }
template <typename N>
DEVICE N shuffle(N value, int from) {
  emulation::Warp& warp = emulation::warp();
  memcpy(warp.words[emulation::current & 31], &value, sizeof value);
  emulation::warp_barrier();
  N other;
  memcpy(&other, warp.words[from], sizeof other);
  emulation::warp_barrier();
  return other;
}
template <typename N>
DEVICE N shuffle_xor(N value, int mask) {
  return shuffle(value, (emulation::current & 31) ^ mask);
}
DEVICE bool any_lane(bool holds) {
  int any = holds;
  for (int mask = 16; mask; mask >>= 1) any |= shuffle_xor(any, mask);
  return any;
}
DEVICE void warp_barrier() { emulation::warp_barrier(); }
DEVICE void block_barrier() { emulation::wait(emulation::arrived, emulation::generation, emulation::live); }
template <int THREADS>
DEVICE void part_barrier() {
  emulation::wait(emulation::part_arrived, emulation::part_generation, THREADS);
}
DEVICE float exponential2(float x) { return exp2f(x); }
DEVICE float exponential(float x) { return expf(x); }
DEVICE float rsqrtf(float x) { return 1.0f / sqrtf(x); }
DEVICE bool is_last_block(u32* counter, u32 expected) {
  static bool last;
  block_barrier();
  if (threadIdx.x == 0) {
    last = ++*counter == expected;
    if (last) *counter = 0;
  }
  block_barrier();
  return last;
}
DEVICE void let_next_start() {}
DEVICE void wait_for_previous() {}
