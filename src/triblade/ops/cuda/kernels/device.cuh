// What the kernels need of the processor, as functions: numbers in pairs, matrix instructions, loads that stay out of the first
// cache, and the order between kernels. Compiled by NVRTC without any header. Tests replace this file by one for a host processor
// that runs the threads of a block in turn, so kernels contain no instruction of their own.
//
// Expects FLOAT16 (1: float16, 0: bfloat16), the type of activations.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct __align__(16) u32x4 {
  u32 x, y, z, w;
};
struct __align__(8) u32x2 {
  u32 x, y;
};
struct __align__(16) f32x4 {
  float x, y, z, w;
};

#define DEVICE static __device__ __forceinline__
#define KERNEL extern "C" __global__ void
#define SHARED __shared__
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) u8 name[]  // as much as the launch says
#define CONSTANT_ARGUMENT(type) const __grid_constant__ type
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

// Two numbers of the type of activations in a word, the first one in the low half.
template <bool F16>
DEVICE u32 pack(float low, float high) {
  u32 word;
  if (F16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

DEVICE float half_value(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

DEVICE u16 half_bits(float value) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

template <bool F16>
DEVICE float low(u32 word) {
  return F16 ? half_value(static_cast<u16>(word)) : __uint_as_float(word << 16);
}

template <bool F16>
DEVICE float high(u32 word) {
  return F16 ? half_value(static_cast<u16>(word >> 16)) : __uint_as_float(word & 0xffff0000u);
}

// a * b + c, pair by pair.
template <bool F16>
DEVICE u32 fma2(u32 a, u32 b, u32 c) {
  u32 result;
  if (F16) asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  else asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

// c [16, 8] += a [16, 16] * b [16, 8] over a warp. Lane 4 g + t holds rows g and g + 8 of a and c, column g of b.
template <bool F16>
DEVICE void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if (F16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Products of whole warpgroups: 64 rows, 16 of each of four warps, by 8 TILES columns. They run by themselves: those between
// `begin_products` and `end_products` are a group, of which `wait_for_products<N>` leaves the last N running. The first operand and the sums
// are as in `multiply`; the second one is in shared memory: 8 columns by 8 inputs (128 bytes) after another, the two halves of 16 inputs
// `inputs_apart` bytes and the tiles of columns `columns_apart` bytes apart.
typedef u64 Operand;

DEVICE u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

DEVICE Operand operand(const void* shared, u32 inputs_apart, u32 columns_apart) {
  return (u64)(shared_address(shared) >> 4) | (u64)(inputs_apart >> 4) << 16 | (u64)(columns_apart >> 4) << 32;
}

// The second operand where both dimensions of a tile come in slices of 128 bytes and their units of 16 bytes are swapped, as the copy engine
// leaves them (`copy_box`): 8 columns after another, each a slice of 64 inputs; or (COLUMNS) 8 inputs after another, each a slice of 64
// columns, further slices `slices_apart` bytes on. Tiles begin at a multiple of 1024 bytes; 16 inputs are two units on, or 2048 bytes.
#define SWAPPED ((u64)1 << 62)
DEVICE Operand operand_of_inputs(const void* shared) { return operand(shared, 16, 1024) | SWAPPED; }
DEVICE Operand operand_of_columns(const void* shared, u32 slices_apart) { return operand(shared, slices_apart, 1024) | SWAPPED; }

#define SUM(x) "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
#define SUMS4(c, n) SUM(c[n]), SUM(c[n + 1]), SUM(c[n + 2]), SUM(c[n + 3])
#define SUMS8(c, n) SUMS4(c, n), SUMS4(c, n + 4)
#define SUMS16(c) SUMS8(c, 0), SUMS8(c, 8)
#define NAMES16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define NAMES32 NAMES16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES64 \
  NAMES32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define PRODUCT(COLUMNS, TYPE, BY_COLUMNS, NAMES, ROWS, SECOND, ...)                                                                  \
  asm volatile("{.reg .pred one; setp.ne.b32 one, 1, 0; wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32." TYPE "." TYPE " {" NAMES \
               "}, {" ROWS "}, " SECOND ", one, 1, 1, " BY_COLUMNS ";}"                                                                \
               : __VA_ARGS__                                                                                                           \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
// c [64, 8 TILES] += a [64, 16] b [16, 8 TILES]; BY_COLUMNS: b is an `operand_of_columns`.
#define MULTIPLY_WIDE(TILES, COLUMNS, NAMES, ROWS, SECOND, ...)                          \
  template <bool F16, bool BY_COLUMNS = false>                                           \
  DEVICE void multiply_wide(float (&c)[TILES][4], const u32 (&a)[4], Operand b) {        \
    if (F16 && BY_COLUMNS) PRODUCT(COLUMNS, "f16", "1", NAMES, ROWS, SECOND, __VA_ARGS__); \
    else if (F16) PRODUCT(COLUMNS, "f16", "0", NAMES, ROWS, SECOND, __VA_ARGS__);        \
    else if (BY_COLUMNS) PRODUCT(COLUMNS, "bf16", "1", NAMES, ROWS, SECOND, __VA_ARGS__); \
    else PRODUCT(COLUMNS, "bf16", "0", NAMES, ROWS, SECOND, __VA_ARGS__);                \
  }
MULTIPLY_WIDE(4, "32", NAMES16, "%16,%17,%18,%19", "%20", SUMS4(c, 0))
MULTIPLY_WIDE(8, "64", NAMES32, "%32,%33,%34,%35", "%36", SUMS8(c, 0))
MULTIPLY_WIDE(16, "128", NAMES64, "%64,%65,%66,%67", "%68", SUMS16(c))

DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
DEVICE void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// A warpgroup that needs few registers leaves them to others, which wait for them. Threads of a block begin with equally many.
template <int REGISTERS>
DEVICE void leave_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Barriers in shared memory that count arrivals and bytes; phases 0, 1, 0, ... end when all that is expected has come.
DEVICE void init_barrier(u64* barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
DEVICE void barriers_are_ready() { asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async;" ::: "memory"); }
DEVICE void arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
DEVICE void expect_bytes(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
DEVICE void wait_for_phase(u64* barrier, u32 phase) {
  asm volatile(
      "{.reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again;}" ::"r"(shared_address(barrier)),
      "r"(phase)
      : "memory");
}

// Copies that run by themselves, by one thread, with a barrier that counts the bytes.
DEVICE void copy_bulk(void* shared, const void* global, u32 bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

// A box of five dimensions on its way out of a tensor that the host has described (`Device.box_map`): of 128-byte slices of the vectors of
// 16 tokens, keys then values. Units of 16 bytes of a slice lie in another order; see `boxes.cuh`.
struct __align__(64) BoxMap {
  u64 words[16];
};
struct Corner {
  int token, slice, kind, block;  // kind: 0 keys, 1 values
};
DEVICE void copy_box(void* shared, const BoxMap& map, const Corner& at, u64* barrier) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(
                   shared_address(shared)),
               "l"(&map), "r"(0), "r"(at.token), "r"(at.slice), "r"(at.kind), "r"(at.block), "r"(shared_address(barrier))
               : "memory");
}
// The first place in shared memory from `shared` on that is a multiple of `bytes`.
DEVICE u8* aligned(u8* shared, u32 bytes) { return shared + (-shared_address(shared) & (bytes - 1)); }

// (a & MASK) | b in one instruction: the compiler makes two of it when both are constants.
template <u32 MASK>
DEVICE u32 and_or(u32 a, u32 b) {
  u32 result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(a), "n"(MASK), "r"(b));
  return result;
}

// A number that is the same in all threads of a warp, so that the compiler knows.
DEVICE int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// Bytes of {a, b} (a is bytes 0 to 3) picked by the four nibbles of `order`.
DEVICE u32 permute(u32 a, u32 b, u32 order) { return __byte_perm(a, b, order); }

// Numbers that nobody writes while the kernel runs and that are read once.
DEVICE u32x4 load_once(const u32x4* p) {
  u32x4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

DEVICE u32 load_once(const u32* p) {
  u32 v;
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}

template <typename N>
DEVICE N shuffle_xor(N value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}

template <typename N>
DEVICE N shuffle(N value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}

DEVICE bool any_lane(bool holds) { return __any_sync(0xffffffffu, holds); }

DEVICE void warp_barrier() { __syncwarp(); }
DEVICE void block_barrier() { __syncthreads(); }
// Of the first THREADS threads of a block; what they wrote to shared memory is there for products and copies as well.
template <int THREADS>
DEVICE void part_barrier() {
  asm volatile("fence.proxy.async.shared::cta; bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}
DEVICE float exponential(float x) { return __expf(x); }
DEVICE float exponential2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// One more arrival at a counter, after everything that this block wrote; true in all threads of the last of `expected` blocks,
// which then sees what the others wrote. The counter is zero again afterwards.
DEVICE bool is_last_block(u32* counter, u32 expected) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(counter, 1u) == expected - 1;
    if (last) *counter = 0;
  }
  __syncthreads();
  if (last) __threadfence();
  return last;
}

// Kernels overlap: the next one in the stream may start when every block has called `let_next_start`, and reads what earlier
// kernels wrote only after `wait_for_previous`. Every kernel must call the latter before it reads or writes what is not constant.
DEVICE void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
