// The opcodes that the compiler generates for the kernels, and their effect on the lanes of a warp.
// `.ftz` replaces subnormal operands and results by 0. `.approx` is as exact as the CPU.
#pragma once
#include "arithmetic.hpp"
#include "warpgroup.hpp"

namespace ptx {
// --- one result from one to three registers -------------------------------------------------------

#define GET(T, n) w.get<T>(i.slots[n], l)
#define EACH_LANE(name, statement) \
    {name, {[](Warp& w, const Instruction& i, uint32_t lanes) { each_lane(lanes, [&](int l) { statement; }); }, InstructionKind::PLAIN}},
// An instruction that computes a register from others, lane by lane. `statements` begin with the
// operands.
#define COMPUTE(name, R, statements, expression) \
    {name, {[](Warp& w, const Instruction& i, uint32_t lanes) { \
        uint64_t* to = w.reg(i.slots[0]); \
        each_separate_lane(lanes, [&](int l) { statements to[l] = to_register((R)(expression)); }); \
    }, InstructionKind::PLAIN}},
#define OPERAND(T, x, n) T x = from_register<T>(w.reg(i.slots[n])[l]);
#define UNARY(name, R, A, expression) COMPUTE(name, R, OPERAND(A, a, 1), expression)
#define BINARY(name, R, A, B, expression) COMPUTE(name, R, OPERAND(A, a, 1) OPERAND(B, b, 2), expression)
#define TERNARY(name, R, A, B, C, expression) COMPUTE(name, R, OPERAND(A, a, 1) OPERAND(B, b, 2) OPERAND(C, c, 3), expression)
#define SAME_TYPE(name, T, expression) BINARY(name, T, T, T, expression)
#define COMPARE(name, T, expression) BINARY("setp." name, uint32_t, T, T, (expression) ? 1 : 0)
#define COMPARE_ALL(type, T) \
    COMPARE("eq." type, T, a == b) COMPARE("lt." type, T, a < b) COMPARE("le." type, T, a <= b) COMPARE("gt." type, T, a > b) \
    COMPARE("ge." type, T, a >= b)
#define INTEGERS(type, T, U) \
    SAME_TYPE("add." type, T, (U)a + (U)b) SAME_TYPE("sub." type, T, (U)a - (U)b) SAME_TYPE("mul.lo." type, T, (U)a * (U)b) SAME_TYPE("div." type, T, divide<T>(a, b)) \
    SAME_TYPE("rem." type, T, b == 0 ? a : (T)((U)a - (U)divide<T>(a, b) * (U)b)) SAME_TYPE("min." type, T, std::min(a, b)) \
    SAME_TYPE("max." type, T, std::max(a, b)) \
    UNARY("neg." type, T, T, 0 - (U)a) BINARY("shr." type, T, T, uint32_t, shift_right<T>(a, b)) TERNARY("mad.lo." type, T, T, T, T, (U)a * (U)b + (U)c) \
    UNARY("mov." type, T, T, a) TERNARY("selp." type, T, T, T, uint32_t, c & 1 ? a : b) COMPARE_ALL(type, T) COMPARE("ne." type, T, a != b)
#define BITS(type, T) \
    SAME_TYPE("and." type, T, a & b) SAME_TYPE("or." type, T, a | b) SAME_TYPE("xor." type, T, a ^ b) UNARY("not." type, T, T, ~a) \
    BINARY("shl." type, T, T, uint32_t, shift_left<T>(a, b)) \
    TERNARY("selp." type, T, T, T, uint32_t, c & 1 ? a : b) COMPARE("eq." type, T, a == b) COMPARE("ne." type, T, a != b)
#define FLOATS(type, T) \
    SAME_TYPE("add." type, T, a + b) SAME_TYPE("add.rn." type, T, a + b) SAME_TYPE("sub." type, T, a - b) SAME_TYPE("mul." type, T, a * b) \
    SAME_TYPE("mul.rn." type, T, a * b) SAME_TYPE("div.rn." type, T, a / b) \
    TERNARY("fma.rn." type, T, T, T, T, std::fma(a, b, c)) SAME_TYPE("max." type, T, std::fmax(a, b)) SAME_TYPE("min." type, T, std::fmin(a, b)) \
    UNARY("neg." type, T, T, -a) \
    UNARY("abs." type, T, T, std::fabs(a)) UNARY("sqrt.rn." type, T, T, std::sqrt(a)) UNARY("rcp.rn." type, T, T, 1 / a) UNARY("mov." type, T, T, a) \
    TERNARY("selp." type, T, T, T, uint32_t, c & 1 ? a : b) COMPARE_ALL(type, T) COMPARE("ne." type, T, a < b || a > b) \
    COMPARE("equ." type, T, !(a < b || a > b)) \
    COMPARE("neu." type, T, !(a == b)) COMPARE("ltu." type, T, !(a >= b)) COMPARE("leu." type, T, !(a > b)) \
    COMPARE("gtu." type, T, !(a <= b)) COMPARE("geu." type, T, !(a < b)) \
    COMPARE("num." type, T, !std::isnan(a) && !std::isnan(b)) COMPARE("nan." type, T, std::isnan(a) || std::isnan(b))
#define CONVERT(to, from, R, A) UNARY("cvt." to "." from, R, A, a)

// mov.b32 between a register and a vector, such as `%r, {%rs, %rs}`, or between registers
inline void pack(Warp& w, const Instruction& i, uint32_t lanes, int bytes) {
    each_lane(lanes, [&](int l) {
        if (i.count == 2) return w.set(i.slots[0], l, w.get<uint64_t>(i.slots[1], l));
        int half = bytes * 4;
        uint64_t mask = (1ull << half) - 1, last = w.get<uint64_t>(i.slots[2], l);
        if (i.splits) {
            w.set(i.slots[0], l, last & mask);
            w.set(i.slots[1], l, last >> half & mask);
        } else {
            w.set(i.slots[0], l, (w.get<uint64_t>(i.slots[1], l) & mask) | (last & mask) << half);
        }
    });
}

// --- memory ---------------------------------------------------------------------------------------

// Returns whether an address is a multiple of the size of an access, which is a power of two.
inline bool is_aligned(uint64_t at, uint64_t bytes) { return (at & (bytes - 1)) == 0; }
inline const uint8_t* gpu_memory(Warp& w, uint64_t at, size_t bytes, const Instruction& i) {
    if (!is_aligned(at, bytes)) stop("an address is misaligned: " + i.text);
    if (!w.block->is_accessible(at, bytes)) stop("an address is outside of GPU memory: " + i.text);
    w.block->bytes += bytes;
    return (const uint8_t*)at;
}
inline Space resolve_space(const Instruction& i, uint64_t& at) {
    if (i.space != Space::GENERIC) return i.space;
    if (at >> 61 == 1) return at -= LOCAL_WINDOW, Space::LOCAL;
    if (at >> 60 == 1) return at -= SHARED_WINDOW, Space::SHARED;
    return Space::GLOBAL;
}
inline uint8_t* resolve_address(Warp& w, const Instruction& i, int l, bool writes) {
    uint64_t at = w.get<uint64_t>(i.base, l);
    if (i.space == Space::SHARED || i.space == Space::LOCAL) at = (uint32_t)at; // addresses of these spaces may have 32 bits
    at += (uint64_t)i.offset;
    uint32_t bytes = (uint32_t)(i.bytes * i.elements);
    switch (resolve_space(i, at)) {
    case Space::PARAM:
        if (writes || at + bytes > w.block->parameters->size()) stop("an access is outside of the parameters: " + i.text);
        return (uint8_t*)w.block->parameters->data() + at;
    case Space::LOCAL:
        if (!is_aligned(at, bytes) || at + bytes > w.kernel->local_bytes) stop("an address is outside of the thread's memory: " + i.text);
        return w.local.data() + (size_t)l * w.kernel->local_bytes + at;
    case Space::SHARED:
        if (!is_aligned(at, bytes)) stop("an address is misaligned: " + i.text);
        if (writes) w.block->shadow.write(w.thread(l), at, bytes, i.text);
        else w.block->shadow.read(w.thread(l), at, bytes, i.text);
        return w.block->shared.data() + at;
    default: return (uint8_t*)gpu_memory(w, at, bytes, i);
    }
}
// Resolves the addresses of a load by a warp. Shared and GPU memory are checked for all lanes at
// once.
inline void resolve_addresses(Warp& w, const Instruction& i, uint32_t lanes, const uint8_t* (&from)[32]) {
    uint64_t at[32], all = 0;
    uint32_t bytes = (uint32_t)(i.bytes * i.elements);
    const uint64_t* base = w.reg(i.base);
    bool is_shared = i.space == Space::SHARED;
    if (is_shared || i.space == Space::GLOBAL) {
        uint64_t mask = is_shared ? 0xffffffff : UINT64_MAX; // an address of shared memory may have 32 bits
        each_separate_lane(lanes, [&](int l) { at[l] = (base[l] & mask) + (uint64_t)i.offset; });
        each_lane(lanes, [&](int l) { all |= at[l]; });
        if (!is_aligned(all, bytes)) stop("an address is misaligned: " + i.text);
        const uint8_t* memory = nullptr;
        if (is_shared) {
            w.block->shadow.read_by_lanes(w.number, lanes, at, bytes, i.text);
            memory = w.block->shared.data();
        } else {
            auto [begin, end] = span_of_lanes(lanes, at, bytes);
            // Lanes may also access several allocations.
            if (!w.block->is_accessible(begin, end - begin)) each_lane(lanes, [&](int l) { gpu_memory(w, at[l], bytes, i); });
            else w.block->bytes += bytes * (uint64_t)__builtin_popcount(lanes);
        }
        each_separate_lane(lanes, [&](int l) { from[l] = memory + at[l]; });
        return;
    }
    each_lane(lanes, [&](int l) { from[l] = resolve_address(w, i, l, false); });
}
template <class T> void load_as(Warp& w, const Instruction& i, uint32_t lanes) {
    const uint8_t* from[32];
    resolve_addresses(w, i, lanes, from);
    for (int e = 0; e < i.elements; e++) {
        uint64_t* to = w.reg(i.slots[e]);
        each_lane(lanes, [&](int l) {
            T x;
            memcpy(&x, from[l] + (size_t)e * sizeof x, sizeof x);
            to[l] = (uint64_t)x;
        });
    }
}
inline void load(Warp& w, const Instruction& i, uint32_t lanes) {
    switch (i.bytes) {
    case 1: return i.is_signed ? load_as<int8_t>(w, i, lanes) : load_as<uint8_t>(w, i, lanes);
    case 2: return i.is_signed ? load_as<int16_t>(w, i, lanes) : load_as<uint16_t>(w, i, lanes);
    case 4: return i.is_signed ? load_as<int32_t>(w, i, lanes) : load_as<uint32_t>(w, i, lanes);
    default: return load_as<uint64_t>(w, i, lanes);
    }
}
template <class T> void store_as(Warp& w, const Instruction& i, uint32_t lanes) {
    each_lane(lanes, [&](int l) {
        uint8_t* to = resolve_address(w, i, l, true);
        for (int e = 0; e < i.elements; e++) memcpy(to + (size_t)e * sizeof(T), &w.reg(i.slots[e])[l], sizeof(T));
    });
}
inline void store(Warp& w, const Instruction& i, uint32_t lanes) {
    switch (i.bytes) {
    case 1: return store_as<uint8_t>(w, i, lanes);
    case 2: return store_as<uint16_t>(w, i, lanes);
    case 4: return store_as<uint32_t>(w, i, lanes);
    default: return store_as<uint64_t>(w, i, lanes);
    }
}
inline Handler find_memory_access(const std::string& name) { return name == "ld" ? load : name == "st" ? store : nullptr; }

// cp.async [shared], [global], bytes, bytes to read (the rest is filled with zeros)
inline void begin_copy(Warp& w, const Instruction& i, uint32_t lanes) {
    each_lane(lanes, [&](int l) {
        uint32_t to = (uint32_t)(w.get<uint32_t>(i.base, l) + i.offset), bytes = w.get<uint32_t>(i.slots[2], l);
        uint32_t taken = i.count > 3 ? std::min(bytes, w.get<uint32_t>(i.slots[3], l)) : bytes;
        uint64_t from = w.get<uint64_t>(i.slots[0], l) + w.get<uint64_t>(i.slots[1], l);
        if (to % bytes || from % bytes) stop("a copy is misaligned: " + i.text);
        if (taken && !w.block->is_accessible(from, taken)) stop("an address is outside of GPU memory: " + i.text);
        w.block->bytes += taken;
        w.block->shadow.write(w.thread(l), to, bytes, i.text, true);
        memset(w.block->shared.data() + to, 0xff, bytes);
        w.copies[l].push_back({to, (const uint8_t*)from, bytes, taken, w.groups[l]});
    });
}
inline void commit_copies(Warp& w, const Instruction&, uint32_t lanes) {
    each_lane(lanes, [&](int l) { w.groups[l]++; });
}
// Executes cp.async.wait_group: completes all groups of copies except the latest ones. A GPU may
// complete them earlier; here they complete as late as possible.
inline void await_copies(Warp& w, const Instruction& i, uint32_t lanes) {
    each_lane(lanes, [&](int l) {
        auto& copies = w.copies[l];
        uint32_t open = w.get<uint32_t>(i.slots[0], l);
        size_t completed = 0;
        for (; completed < copies.size() && copies[completed].group + open < w.groups[l]; completed++) {
            const PendingCopy& c = copies[completed];
            uint8_t* to = w.block->shared.data() + c.to;
            memcpy(to, c.from, c.taken);
            memset(to + c.taken, 0, c.bytes - c.taken);
            w.block->shadow.complete_copy(w.thread(l), c.to, c.bytes);
        }
        copies.erase(copies.begin(), copies.begin() + (std::ptrdiff_t)completed);
    });
}

// --- collective instructions ----------------------------------------------------------------------

inline void shuffle(Warp& w, const Instruction& i, uint32_t lanes) { // shfl.sync.bfly d|p, a, other, 31
    uint32_t before[32];
    for (int l = 0; l < 32; l++) before[l] = w.get<uint32_t>(i.slots[2], l);
    each_lane(lanes, [&](int l) {
        int from = l ^ (int)w.get<uint32_t>(i.slots[3], l);
        if (from > 31 || !(lanes >> from & 1)) stop("a shuffle from an inactive lane: " + i.text);
        w.set<uint32_t>(i.slots[0], l, before[from]);
        w.set<uint32_t>(i.slots[1], l, 1);
    });
}
inline void shuffle_from_lane(Warp& w, const Instruction& i, uint32_t lanes) { // shfl.sync.idx d|p, a, lane, 31
    uint32_t before[32];
    for (int l = 0; l < 32; l++) before[l] = w.get<uint32_t>(i.slots[2], l);
    each_lane(lanes, [&](int l) {
        uint32_t from = w.get<uint32_t>(i.slots[3], l) & 31;
        if (!(lanes >> from & 1)) stop("a shuffle from an inactive lane: " + i.text);
        w.set<uint32_t>(i.slots[0], l, before[from]);
        w.set<uint32_t>(i.slots[1], l, 1);
    });
}
template <bool require_all> void vote(Warp& w, const Instruction& i, uint32_t lanes) {
    uint32_t yes = 0;
    each_lane(lanes, [&](int l) { yes |= (uint32_t)(w.reg(i.slots[1])[l] & 1) << l; });
    uint32_t result = require_all ? yes == lanes : yes != 0;
    each_lane(lanes, [&](int l) { w.set<uint32_t>(i.slots[0], l, result); });
}
template <bool largest> void reduce(Warp& w, const Instruction& i, uint32_t lanes) {
    int32_t best = largest ? INT32_MIN : INT32_MAX;
    each_lane(lanes, [&](int l) {
        int32_t x = w.get<int32_t>(i.slots[1], l);
        best = largest ? std::max(best, x) : std::min(best, x);
    });
    each_lane(lanes, [&](int l) { w.set<int32_t>(i.slots[0], l, best); });
}
inline void warp_barrier(Warp& w, const Instruction&, uint32_t) { w.block->shadow.warp_barrier(w.number); }

// mma.m16n8k16: d[16, 8] = a[16, 16] · b[16, 8] + c, with two bf16 or f16 values per register of a
// and b.
// Lane 4·g + t has
// - of a: rows g and g + 8, columns 2t, 2t + 1, 2t + 8 and 2t + 9;
// - of b: rows 2t, 2t + 1, 2t + 8 and 2t + 9 of column g;
// - of c and d: rows g and g + 8, columns 2t and 2t + 1.
template <float to_float(uint32_t)> void multiply(Warp& w, const Instruction& i, uint32_t lanes) {
    if (lanes != ALL) stop("mma needs a whole warp: " + i.text);
    float a[16][16], b[16][8], d[32][4];
    for (int l = 0; l < 32; l++) {
        int g = l / 4, t = l % 4;
        for (int n = 0; n < 4; n++) {
            uint32_t two = w.get<uint32_t>(i.slots[4 + n], l);
            for (int h = 0; h < 2; h++) a[g + 8 * (n % 2)][2 * t + h + 8 * (n / 2)] = to_float(h ? two >> 16 : two & 0xffff);
        }
        for (int n = 0; n < 2; n++) {
            uint32_t two = w.get<uint32_t>(i.slots[8 + n], l);
            for (int h = 0; h < 2; h++) b[2 * t + h + 8 * n][g] = to_float(h ? two >> 16 : two & 0xffff);
        }
    }
    for (int l = 0; l < 32; l++)
        for (int n = 0; n < 4; n++) {
            int row = l / 4 + 8 * (n / 2), column = 2 * (l % 4) + n % 2;
            float sum = w.get<float>(i.slots[10 + n], l);
            for (int k = 0; k < 16; k++) sum += a[row][k] * b[k][column];
            d[l][n] = sum;
        }
    for (int l = 0; l < 32; l++)
        for (int n = 0; n < 4; n++) w.set<float>(i.slots[n], l, d[l][n]);
}
// ldmatrix.m8n8.x4: lanes 8·n to 8·n + 7 have the addresses of the rows of matrix n. Lane l
// receives elements 2·(l % 4) and 2·(l % 4) + 1 of row l / 4 of each matrix, or of column l / 4
// with `.trans`. Bank conflicts between rows of a matrix are slow on a GPU; here they are an error.
template <bool transposed> void load_matrices(Warp& w, const Instruction& i, uint32_t lanes) {
    if (lanes != ALL) stop("ldmatrix needs a whole warp: " + i.text);
    uint16_t x[4][8][8];
    for (int n = 0; n < 4; n++) {
        uint32_t banks = 0;
        for (int row = 0; row < 8; row++) {
            uint32_t at = (uint32_t)(w.get<uint32_t>(i.base, 8 * n + row) + i.offset);
            if (at % 16) stop("a row of a matrix is misaligned: " + i.text);
            w.block->shadow.read_by_several_lanes(w.number, at, 16, i.text);
            memcpy(x[n][row], w.block->shared.data() + at, 16);
            banks |= 1u << at / 16 % 8;
        }
        if (banks != 0xff) stop("rows of a matrix have a bank conflict: " + i.text);
    }
    for (int l = 0; l < 32; l++)
        for (int n = 0; n < 4; n++) {
            int one = l / 4, two = 2 * (l % 4);
            uint32_t low = transposed ? x[n][two][one] : x[n][one][two], high = transposed ? x[n][two + 1][one] : x[n][one][two + 1];
            w.set<uint32_t>(i.slots[n], l, low | high << 16);
        }
}

// --- the table of opcodes -------------------------------------------------------------------------

inline const Opcode* find_opcode(const std::string& name) {
    using std::fma;
    static const std::map<std::string, Opcode> opcodes = {
        INTEGERS("s16", int16_t, uint32_t) INTEGERS("u16", uint16_t, uint32_t) INTEGERS("s32", int32_t, uint32_t) INTEGERS("u32", uint32_t, uint32_t)
        INTEGERS("s64", int64_t, uint64_t) INTEGERS("u64", uint64_t, uint64_t) BITS("b16", uint16_t) BITS("b32", uint32_t) BITS("b64", uint64_t)
        FLOATS("f32", float) FLOATS("f64", double)
        // predicates
        SAME_TYPE("and.pred", uint32_t, a & b & 1) SAME_TYPE("or.pred", uint32_t, (a | b) & 1) SAME_TYPE("xor.pred", uint32_t, (a ^ b) & 1)
        UNARY("not.pred", uint32_t, uint32_t, ~a & 1) UNARY("mov.pred", uint32_t, uint32_t, a & 1)
        // wide multiplications and special functions
        SAME_TYPE("mul.hi.u32", uint32_t, (uint64_t)a * b >> 32) BINARY("mul.wide.s32", int64_t, int32_t, int32_t, (int64_t)a * b)
        BINARY("mul.wide.u32", uint64_t, uint32_t, uint32_t, (uint64_t)a * b) BINARY("mul.wide.u16", uint32_t, uint16_t, uint16_t, (uint32_t)a * b)
        TERNARY("fma.rm.f32", float, float, float, float, fma_round_down(a, b, c)) SAME_TYPE("copysign.f32", float, std::copysign(b, a))
        SAME_TYPE("div.approx.f32", float, a / b) UNARY("ex2.approx.f32", float, float, std::exp2(a))
        UNARY("ex2.approx.ftz.f32", float, float, flush_subnormal(std::exp2(flush_subnormal(a))))
        UNARY("rcp.approx.ftz.f32", float, float, flush_subnormal(1 / flush_subnormal(a))) UNARY("rsqrt.approx.f32", float, float, 1 / std::sqrt(a))
        UNARY("rsqrt.approx.ftz.f32", float, float, flush_subnormal(1 / std::sqrt(flush_subnormal(a)))) UNARY("lg2.approx.f32", float, float, std::log2(a))
        UNARY("rcp.approx.ftz.f64", double, double, 1 / a)
        EACH_LANE("bfi.b32", w.set(i.slots[0], l, insert_bits<uint32_t>(GET(uint32_t, 1), GET(uint32_t, 2), GET(uint32_t, 3), GET(uint32_t, 4))))
        EACH_LANE("bfi.b64", w.set(i.slots[0], l, insert_bits<uint64_t>(GET(uint64_t, 1), GET(uint64_t, 2), GET(uint32_t, 3), GET(uint32_t, 4))))
        TERNARY("prmt.b32", uint32_t, uint32_t, uint32_t, uint32_t, permute_bytes(a, b, c)) UNARY("mov.b16", uint16_t, uint16_t, a)
        {"mov.b32", {[](Warp& w, const Instruction& i, uint32_t lanes) { pack(w, i, lanes, 4); }, InstructionKind::PLAIN}},
        {"mov.b64", {[](Warp& w, const Instruction& i, uint32_t lanes) { pack(w, i, lanes, 8); }, InstructionKind::PLAIN}},
        // conversions
        CONVERT("s64", "s32", int64_t, int32_t) CONVERT("u64", "u32", uint64_t, uint32_t) CONVERT("u32", "u64", uint32_t, uint64_t)
        CONVERT("u16", "u32", uint16_t, uint32_t)
        CONVERT("u16", "u64", uint16_t, uint64_t) CONVERT("u32", "u16", uint32_t, uint16_t) CONVERT("s32", "s16", int32_t, int16_t)
        CONVERT("u64", "u16", uint64_t, uint16_t)
        CONVERT("f64", "f32", double, float) CONVERT("rn.f32", "f64", float, double) CONVERT("rn.f32", "s32", float, int32_t)
        CONVERT("rn.f32", "u32", float, uint32_t)
        CONVERT("rn.f32", "s64", float, int64_t) CONVERT("rn.f32", "u64", float, uint64_t)
        UNARY("cvt.f32.f16", float, uint16_t, f16_to_float(a)) UNARY("cvt.rn.f16.f32", uint16_t, float, to_f16_bits(a))
        UNARY("cvt.sat.f32.f32", float, float, std::isnan(a) ? 0 : std::min(std::max(a, 0.0f), 1.0f))
        BINARY("cvt.rn.bf16x2.f32", uint32_t, float, float, to_bf16_bits(a) << 16 | to_bf16_bits(b))
        BINARY("cvt.rn.f16x2.f32", uint32_t, float, float, to_f16_bits(a) << 16 | to_f16_bits(b))
        BINARY("cvt.rn.satfinite.e4m3x2.f32", uint16_t, float, float, to_e4m3(a) << 8 | to_e4m3(b))
        BINARY("cvt.rn.satfinite.e5m2x2.f32", uint16_t, float, float, to_e5m2(a) << 8 | to_e5m2(b))
        UNARY("cvta.to.global.u64", uint64_t, uint64_t, a) UNARY("cvta.global.u64", uint64_t, uint64_t, a)
        UNARY("cvta.shared.u64", uint64_t, uint64_t, a + SHARED_WINDOW)
        UNARY("cvta.to.shared.u64", uint64_t, uint64_t, a - SHARED_WINDOW) UNARY("cvta.local.u64", uint64_t, uint64_t, a + LOCAL_WINDOW)
        UNARY("cvta.to.local.u64", uint64_t, uint64_t, a - LOCAL_WINDOW)
        // copies, collective instructions and barriers
        {"cp.async.cg.shared.global", {begin_copy, InstructionKind::PLAIN}},
        {"cp.async.ca.shared.global", {begin_copy, InstructionKind::PLAIN}},
        {"cp.async.commit_group", {commit_copies, InstructionKind::PLAIN}},
        {"cp.async.wait_group", {await_copies, InstructionKind::PLAIN}},
        {"shfl.sync.bfly.b32", {shuffle, InstructionKind::COLLECTIVE}},
        {"shfl.sync.idx.b32", {shuffle_from_lane, InstructionKind::COLLECTIVE}},
        {"vote.sync.all.pred", {vote<true>, InstructionKind::COLLECTIVE}},
        {"vote.sync.any.pred", {vote<false>, InstructionKind::COLLECTIVE}},
        {"redux.sync.max.s32", {reduce<true>, InstructionKind::COLLECTIVE}},
        {"redux.sync.min.s32", {reduce<false>, InstructionKind::COLLECTIVE}},
        {"bar.warp.sync", {warp_barrier, InstructionKind::COLLECTIVE}},
        {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", {multiply<bf16_to_float>, InstructionKind::COLLECTIVE}},
        {"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", {multiply<f16_to_float>, InstructionKind::COLLECTIVE}},
        {"ldmatrix.sync.aligned.m8n8.x4.shared.b16", {load_matrices<false>, InstructionKind::COLLECTIVE}},
        {"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", {load_matrices<true>, InstructionKind::COLLECTIVE}},
        // warpgroups
        {"wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16", {begin_product, InstructionKind::COLLECTIVE}},
        {"wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16", {begin_product, InstructionKind::COLLECTIVE}},
        {"wgmma.fence.sync.aligned", {wgmma_fence, InstructionKind::COLLECTIVE}},
        {"wgmma.commit_group.sync.aligned", {commit_products, InstructionKind::COLLECTIVE}},
        {"wgmma.wait_group.sync.aligned", {await_products, InstructionKind::COLLECTIVE}},
        {"setmaxnreg.inc.sync.aligned.u32", {set_registers, InstructionKind::COLLECTIVE}},
        {"setmaxnreg.dec.sync.aligned.u32", {set_registers, InstructionKind::COLLECTIVE}},
        {"fence.proxy.async.shared::cta", {proxy_fence, InstructionKind::PLAIN}},
        {"fence.mbarrier_init.release.cluster", {[](Warp&, const Instruction&, uint32_t) {}, InstructionKind::PLAIN}},
        {"mbarrier.init.shared::cta.b64", {init_memory_barrier, InstructionKind::PLAIN}},
        {"mbarrier.arrive.shared::cta.b64", {arrive_at_memory_barrier, InstructionKind::PLAIN}},
        {"mbarrier.try_wait.parity.shared::cta.b64", {try_memory_barrier, InstructionKind::PLAIN}},
        {"bar.arrive", {arrive_only, InstructionKind::PLAIN}},
        {"bra", {nullptr, InstructionKind::BRANCH}},
        {"bra.uni", {nullptr, InstructionKind::BRANCH}},
        {"ret", {nullptr, InstructionKind::EXIT}},
        {"exit", {nullptr, InstructionKind::EXIT}},
        {"bar.sync", {nullptr, InstructionKind::BARRIER}},
    };
    auto found = opcodes.find(name);
    return found == opcodes.end() ? nullptr : &found->second;
}
} // namespace ptx
