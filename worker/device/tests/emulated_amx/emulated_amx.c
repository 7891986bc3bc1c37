/* Emulates the AMX instructions of x86-64 CPUs for bf16, on machines that lack them.
 *
 * The library is preloaded (LD_PRELOAD) or opened with global symbols. It handles the signal
 * SIGILL that such an instruction raises: it decodes the instruction, checks it as a CPU does,
 * computes its result in memory, and continues after it. Every thread has its own tiles. An
 * instruction that a CPU would reject ends the process with a message and with the signal that
 * the CPU's exception causes: SIGILL for #UD, SIGSEGV for #GP.
 *
 * Encodings and checks are those of Intel's Software Developer's Manual, volume 2, instructions
 * LDTILECFG to TILEZERO, and of the exception classes AMX-E1 to AMX-E6. */
#define _GNU_SOURCE
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum { TILES = 8, MAX_ROWS = 16, MAX_COLSB = 64, PALETTE_1 = 1 };

/* The memory operand of LDTILECFG and STTILECFG. */
struct configuration {
    uint8_t palette, start_row, reserved[14];
    uint16_t colsb[16];
    uint8_t rows[16];
};
_Static_assert(sizeof(struct configuration) == 64, "the configuration has 64 bytes");

/* The tile state of one thread. It is in its initial state while the palette is 0. */
struct tile_state {
    struct configuration configuration;
    _Alignas(64) uint8_t data[TILES][MAX_ROWS][MAX_COLSB];
};
static _Thread_local struct tile_state state;

static atomic_ulong products;
/* Whether the lowest bit of the first element of each product is wrong. */
static int has_error;
static struct sigaction previous_action;

/* Tells the CPU backend that AMX instructions work in this process, although the CPU lacks them. */
EXPORT int launch_emulated_amx(void) {
    return 1;
}

/* Returns how many TDPBF16PS instructions have been emulated in this process. */
EXPORT unsigned long launch_emulated_amx_products(void) {
    return atomic_load(&products);
}

/* Ends the process with `signal_number`, as an instruction that the CPU rejects does. */
static void reject(int signal_number, const char *format, ...) {
    char text[256];
    va_list arguments;
    va_start(arguments, format);
    int length = snprintf(text, sizeof text, "emulated AMX: ");
    length += vsnprintf(text + length, sizeof text - (size_t)length, format, arguments);
    va_end(arguments);
    length += snprintf(text + length, sizeof text - (size_t)length, "\n");
    if (write(STDERR_FILENO, text, (size_t)length) < 0) {
        /* The signal alone has to do. */
    }
    signal(signal_number, SIG_DFL);
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, signal_number);
    sigprocmask(SIG_UNBLOCK, &set, NULL);
    raise(signal_number);
    _exit(127);
}

#define UNDEFINED(...) reject(SIGILL, "#UD: " __VA_ARGS__)
#define PROTECTION(...) reject(SIGSEGV, "#GP: " __VA_ARGS__)

/* A decoded instruction: its prefix (0, or 0x66, 0xF3, 0xF2 as 1, 2, 3), operands and address. */
struct instruction {
    unsigned length, prefix, opcode, reg, rm, vvvv;
    int is_register;
    int has_index;
    uint64_t base, stride;
};

static uint64_t read_register(const greg_t *registers, unsigned number) {
    static const int order[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                  REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    return (uint64_t)registers[order[number]];
}

static int32_t read_i32(const uint8_t *at) {
    int32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

/* Decodes the memory operand after the ModRM byte at `at`. Returns the address of the byte
 * after it. `x` and `b` are the extension bits of the index and the base. */
static const uint8_t *decode_address(struct instruction *i, const uint8_t *at, const greg_t *registers,
                                     unsigned x, unsigned b) {
    unsigned mod = *at >> 6, rm = *at & 7;
    at++;
    unsigned base = rm | b << 3;
    int is_relative = mod == 0 && rm == 5, has_base = !is_relative;
    if (rm == 4) {
        unsigned scale = *at >> 6, index = (*at >> 3 & 7) | x << 3;
        base = (*at & 7) | b << 3;
        has_base = !(mod == 0 && (base & 7) == 5);
        i->has_index = index != 4;
        i->stride = i->has_index ? read_register(registers, index) << scale : 0;
        at++;
        if (!has_base) {
            i->base = (uint64_t)(int64_t)read_i32(at);
            return at + 4;
        }
    }
    if (has_base) {
        i->base = read_register(registers, base);
    }
    if (mod == 1) {
        i->base += (uint64_t)(int64_t)(int8_t)*at;
        return at + 1;
    }
    if (mod == 2 || is_relative) {
        i->base += (uint64_t)(int64_t)read_i32(at);
        at += 4;
    }
    if (is_relative) {
        i->base += (uint64_t)(uintptr_t)at;
    }
    return at;
}

/* Decodes the instruction at `start`. Returns 0 if it is not a 128-bit VEX instruction of the map
 * 0F38 with W = 0, to which all AMX instructions belong. */
static int decode(struct instruction *i, const uint8_t *start, const greg_t *registers) {
    memset(i, 0, sizeof *i);
    if (start[0] != 0xC4 || (start[1] & 0x1F) != 2 || (start[2] & 0x84) != 0) {
        return 0;
    }
    unsigned r = !(start[1] & 0x80), x = !(start[1] & 0x40), b = !(start[1] & 0x20);
    i->vvvv = ~(start[2] >> 3) & 15;
    i->prefix = start[2] & 3;
    i->opcode = start[3];
    i->reg = (start[4] >> 3 & 7) | r << 3;
    i->rm = (start[4] & 7) | b << 3;
    i->is_register = start[4] >> 6 == 3;
    const uint8_t *end = i->is_register ? start + 5 : decode_address(i, start + 4, registers, x, b);
    i->length = (unsigned)(end - start);
    return 1;
}

static void load_configuration(const struct configuration *from) {
    if (from->palette > PALETTE_1) {
        PROTECTION("LDTILECFG: palette %d", from->palette);
    }
    if (from->palette == 0) {
        memset(&state, 0, sizeof state);
        return;
    }
    for (int k = 0; k < 14; k++) {
        if (from->reserved[k] != 0) {
            PROTECTION("LDTILECFG: byte %d is reserved", 2 + k);
        }
    }
    for (int tile = 0; tile < 16; tile++) {
        unsigned rows = from->rows[tile], colsb = from->colsb[tile];
        if (tile >= TILES && (rows != 0 || colsb != 0)) {
            PROTECTION("LDTILECFG: there is no tile %d", tile);
        }
        if (rows > MAX_ROWS || colsb > MAX_COLSB || (rows == 0) != (colsb == 0)) {
            PROTECTION("LDTILECFG: tile %d has %u rows of %u bytes", tile, rows, colsb);
        }
    }
    memset(state.data, 0, sizeof state.data);
    state.configuration = *from;
}

/* Ends the process unless the tile exists and is configured. */
static void check_tile(const char *name, unsigned tile) {
    if (state.configuration.palette == 0) {
        UNDEFINED("%s: the tiles are not configured", name);
    }
    if (tile >= TILES || state.configuration.rows[tile] == 0) {
        UNDEFINED("%s: tile %u is not configured", name, tile);
    }
}

static void move_tile(const char *name, const struct instruction *i, int is_load) {
    unsigned tile = i->reg;
    if ((i->rm & 7) != 4 || i->vvvv != 0) {
        UNDEFINED("%s: the encoding has no SIB byte, or an operand vvvv", name);
    }
    check_tile(name, tile);
    unsigned rows = state.configuration.rows[tile], colsb = state.configuration.colsb[tile];
    for (unsigned row = state.configuration.start_row; row < rows; row++) {
        uint8_t *memory = (uint8_t *)(uintptr_t)(i->base + row * i->stride);
        if (is_load) {
            memset(state.data[tile][row], 0, MAX_COLSB);
            memcpy(state.data[tile][row], memory, colsb);
        } else {
            memcpy(memory, state.data[tile][row], colsb);
        }
    }
    if (is_load) {
        memset(state.data[tile][rows], 0, (MAX_ROWS - rows) * (size_t)MAX_COLSB);
    }
    state.configuration.start_row = 0;
}

static float widen(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* Adds the products of `pairs` pairs of bf16 numbers to each of the `columns` elements of `c`:
 * two chains of fused multiply-adds from zero, one over the first and one over the second
 * numbers of the pairs. The chains are added, and their sum is added to the element. */
static __attribute__((noinline)) void multiply_row(float *c, const uint16_t *a, uint8_t (*b)[MAX_COLSB],
                                                   unsigned pairs, unsigned columns) {
    float even[16] = {0}, odd[16] = {0};
    for (unsigned k = 0; k < pairs; k++) {
        uint16_t row[32];
        memcpy(row, b[k], sizeof row);
        float first = widen(a[2 * k]), second = widen(a[2 * k + 1]);
        for (int n = 0; n < 16; n++) {
            even[n] = fmaf(first, widen(row[2 * n]), even[n]);
            odd[n] = fmaf(second, widen(row[2 * n + 1]), odd[n]);
        }
    }
    for (unsigned n = 0; n < columns; n++) {
        c[n] += even[n] + odd[n];
    }
}

/* Sets the control register of the arithmetic. The kernel restores the program's own value when the
 * signal handler returns. */
static void set_mxcsr(uint32_t value) {
    __asm__ volatile("ldmxcsr %0" : : "m"(value) : "memory");
}

static void multiply_tiles(const struct instruction *i) {
    const char *name = "TDPBF16PS";
    unsigned c = i->reg, a = i->rm, b = i->vvvv;
    if (c == a || c == b || a == b) {
        UNDEFINED("%s: tiles %u, %u and %u are not different", name, c, a, b);
    }
    check_tile(name, c);
    check_tile(name, a);
    check_tile(name, b);
    const struct configuration *k = &state.configuration;
    if (k->colsb[a] % 4 != 0 || k->colsb[b] % 4 != 0 || k->colsb[c] % 4 != 0) {
        UNDEFINED("%s: a row's length is not a multiple of 4 bytes", name);
    }
    if (k->rows[c] != k->rows[a] || k->colsb[c] != k->colsb[b] || k->colsb[a] / 4 != k->rows[b]) {
        UNDEFINED("%s: shapes of tiles %u, %u and %u do not match", name, c, a, b);
    }
    /* round to nearest, denormals are zero, flush to zero, no exceptions */
    set_mxcsr(0x1F80 | 0x8040);
    for (unsigned row = 0; row < k->rows[c]; row++) {
        float sums[16];
        uint16_t left[32];
        memcpy(sums, state.data[c][row], sizeof sums);
        memcpy(left, state.data[a][row], sizeof left);
        multiply_row(sums, left, state.data[b], k->colsb[a] / 4, k->colsb[c] / 4);
        memset(state.data[c][row], 0, MAX_COLSB);
        memcpy(state.data[c][row], sums, k->colsb[c]);
    }
    state.data[c][0][0] ^= (uint8_t)has_error;
    memset(state.data[c][k->rows[c]], 0, (MAX_ROWS - k->rows[c]) * (size_t)MAX_COLSB);
    state.configuration.start_row = 0;
    atomic_fetch_add(&products, 1);
}

/* Executes an instruction with the opcode 49: LDTILECFG, STTILECFG, TILERELEASE or TILEZERO.
 * Returns 0 if it is another instruction. */
static int execute_control(const struct instruction *i) {
    if (i->vvvv != 0) {
        return 0;
    }
    if (i->is_register && i->prefix == 3 && (i->rm & 7) == 0) {
        check_tile("TILEZERO", i->reg);
        memset(state.data[i->reg], 0, sizeof state.data[i->reg]);
        state.configuration.start_row = 0;
        return 1;
    }
    if (i->reg != 0) {
        return 0;
    }
    if (i->is_register && i->prefix == 0 && i->rm == 0) {
        memset(&state, 0, sizeof state);
        return 1;
    }
    if (!i->is_register && i->prefix == 0) {
        /* LDTILECFG reads no index as a stride: the index belongs to the address. */
        struct configuration from;
        memcpy(&from, (const void *)(uintptr_t)(i->base + i->stride), sizeof from);
        load_configuration(&from);
        return 1;
    }
    if (!i->is_register && i->prefix == 1) {
        memcpy((void *)(uintptr_t)(i->base + i->stride), &state.configuration, sizeof state.configuration);
        return 1;
    }
    return 0;
}

/* Executes an AMX instruction. Returns 0 if it is another instruction. */
static int execute(const struct instruction *i) {
    if (i->opcode == 0x49) {
        return execute_control(i);
    }
    if (i->opcode == 0x4B && !i->is_register && i->prefix != 0) {
        const char *names[4] = {"", "TILELOADDT1", "TILESTORED", "TILELOADD"};
        move_tile(names[i->prefix], i, i->prefix != 2);
        return 1;
    }
    if (i->opcode == 0x5C && i->is_register && i->prefix == 2) {
        multiply_tiles(i);
        return 1;
    }
    return 0;
}

static void handle_sigill(int signal_number, siginfo_t *info, void *context) {
    (void)signal_number;
    (void)info;
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    struct instruction i;
    if (decode(&i, (const uint8_t *)(uintptr_t)registers[REG_RIP], registers) && execute(&i)) {
        registers[REG_RIP] += i.length;
        return;
    }
    /* The instruction is executed again, without this handler. */
    sigaction(SIGILL, &previous_action, NULL);
}

__attribute__((constructor)) static void install(void) {
    has_error = getenv("LAUNCH_TEST_AMX_ERROR") != NULL;
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = handle_sigill;
    /* A tile load may fault inside the handler, which is a fault of the program. */
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigemptyset(&action.sa_mask);
    sigaction(SIGILL, &action, &previous_action);
}
