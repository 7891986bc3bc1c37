// Estimated durations of GPU work for the virtual clock (timeline.hpp). docs/design/cuda.md
// describes the estimates, and which of them are measured.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

namespace costs {
// Times of the host per call, in ns, with the program's work between calls.
constexpr double LAUNCH_CALL = 5000, MATMUL_CALL = 8000, COPY_CALL = 4000, FILL_CALL = 3500, EVENT_CALL = 800, QUERY_CALL = 400,
                 MEMORY_CALL = 800, GRAPH_CALL = 6000, GRAPH_UPDATE_CALL = 1500, NCCL_CALL = 40000;
// Time from a call until its work can start, and time that each piece of work takes in addition to
// its data.
constexpr double LAUNCH_LATENCY = 3000, WORK_OVERHEAD = 2000, GRAPH_WORK_OVERHEAD = 1200;

struct Gpu {
    double bytes_per_ns;        // of a copy within the GPU
    double matmul_flops_per_ns; // of large bf16 matmuls during training
    double fp32_flops_per_ns, fp8_factor;
    int multiprocessors;
    long memory, l2_cache;
    double pcie_bytes_per_ns;
    // Bandwidth of collectives within a host and between hosts, per GPU and as NCCL's tests count
    // it (bus bandwidth), and of sends and receives.
    double gather_bytes_per_ns, gather_bytes_per_ns_between_hosts, send_bytes_per_ns, send_bytes_per_ns_between_hosts;
};
static const Gpu H200 = {4240, 700e3, 45e3, 1.75, 132, 141l << 30, 50l << 20, 50, 360, 330, 360, 45};
static const Gpu H100 = {3000, 700e3, 45e3, 1.75, 132, 80l << 30, 50l << 20, 50, 360, 330, 360, 45};
static Gpu gpu = H200;
static inline bool select_gpu(const std::string& name) {
    if (name == "h200") gpu = H200;
    else if (name == "h100") gpu = H100;
    else return false;
    return true;
}

// Time of work that reads and writes `bytes` of GPU memory. `share` is the part of the bandwidth
// that its instructions can use.
static inline double transfer_ns(double bytes, double share = 1) { return WORK_OVERHEAD + bytes / (gpu.bytes_per_ns * share); }
static inline double pcie_ns(double bytes) { return WORK_OVERHEAD + bytes / gpu.pcie_bytes_per_ns; }

// Time of a matmul of m × k and k × n elements of `size` bytes, whose result has elements of
// `result_size` bytes. Tiles of the result are computed in waves of one tile per multiprocessor.
// With few tiles, the sum is split. Each wave also takes as long as WAVE_DEPTH more terms of the
// sum, to load the first operands and to store the result.
static inline double matmul_ns(double m, double n, double k, double size, double result_size, bool reads_result) {
    constexpr double WAVE_DEPTH = 160;
    struct Tile {
        double rows, columns, speed;
    };
    constexpr Tile TILES[] = {{128, 256, 1}, {128, 192, 0.96}, {128, 128, 0.9}, {64, 128, 0.7}};
    double speed = size == 4 ? gpu.fp32_flops_per_ns : size == 1 ? gpu.matmul_flops_per_ns * gpu.fp8_factor : gpu.matmul_flops_per_ns;
    double best = INFINITY;
    for (const Tile& tile : TILES)
        for (double splits : {1.0, 2.0, 4.0, 8.0}) {
            double tiles = std::ceil(m / tile.rows) * std::ceil(n / tile.columns) * splits;
            double waves = std::ceil(tiles / gpu.multiprocessors);
            double wave_ns = 2 * tile.rows * tile.columns * (k / splits + WAVE_DEPTH) / (speed * tile.speed / gpu.multiprocessors);
            double parts = splits > 1 ? 2 * splits * m * n * 4 / gpu.bytes_per_ns : 0;
            best = std::min(best, waves * wave_ns + parts);
        }
    double bytes = (m * k + k * n) * size + m * n * result_size * (reads_result ? 2 : 1);
    return WORK_OVERHEAD + std::max(best, bytes / gpu.bytes_per_ns);
}

// Time that GELU in the epilogue adds to a matmul with `elements` results: its input is written, or
// read for the derivative, and instructions that nothing hides.
static inline double gelu_epilogue_ns(double elements, double size, bool is_backward) {
    constexpr double LANES = 128, GHZ = 1.7;
    double instructions = is_backward ? 24 : 16;
    return elements * size / gpu.bytes_per_ns + elements * instructions / (gpu.multiprocessors * LANES * GHZ);
}
// Time that the sums of an operand of `bytes` bytes add to a matmul: that of reading it once more.
static inline double sums_epilogue_ns(double bytes) { return bytes / gpu.bytes_per_ns; }

// Time of causal attention: FLOPs / (limit · t / (t + half)), which fits the measured rates for
// sequences of 1024 and 2048 tokens. A backward pass counts 2.5 times the FLOPs of a forward pass.
static inline double attention_ns(double sequences, double heads, double t, double dim, bool is_backward) {
    double flops = 2 * sequences * heads * t * t * dim * (is_backward ? 2.5 : 1);
    double limit = dim > 64 ? (is_backward ? 328e3 : 654e3) : (is_backward ? 597e3 : 519e3);
    double half = dim > 64 ? (is_backward ? 196 : 975) : (is_backward ? 1846 : 1403);
    return WORK_OVERHEAD + flops / (limit * t / (t + half));
}

// Time of a collective in which each of `world` ranks receives, or sends, all but its own part of
// `bytes` bytes (all-gather, reduce-scatter).
static inline double ring_ns(double bytes, int world, int ranks_per_host) {
    if (world == 1) return WORK_OVERHEAD;
    bool is_one_host = world <= ranks_per_host;
    double per_step = is_one_host ? 1500 : 2500, speed = is_one_host ? gpu.gather_bytes_per_ns : gpu.gather_bytes_per_ns_between_hosts;
    return 15000 + per_step * (world - 1) + bytes * (world - 1) / world / speed;
}
// Time of a group of sends and receives, with the bytes that one rank sends to ranks of its host
// and of other hosts.
static inline double exchange_ns(double bytes, double bytes_between_hosts) {
    return 20000 + std::max(bytes / gpu.send_bytes_per_ns, bytes_between_hosts / gpu.send_bytes_per_ns_between_hosts);
}

// Kind and duration of a kernel.
struct Work {
    const char* kind;
    double ns;
};

// Reads the arguments of a kernel launch.
struct Arguments {
    void** at;
    double integer(int i) const { return (double)*(long long*)at[i]; }
    // Returns a member of a struct of 64-bit integers.
    double member(int i, int index) const { return (double)((long long*)at[i])[index]; }
    // Returns the bytes of an element of a tensor, or 0 if the tensor is absent.
    double size(int i) const {
        auto tensor = (long long*)at[i];
        return !tensor[0] ? 0 : tensor[1] == 0 ? 4 : 2;
    }
};

static inline bool begins_with(const std::string& name, const char* prefix) { return !name.compare(0, strlen(prefix), prefix); }

// Returns the part of the matmuls of a backward pass that a kernel computes. Of seven matmuls, three
// are in the kernel by queries. With heads of more than 128 elements, there are eight: three in each
// of the kernels for queries and for keys, and two in the kernel for values.
static inline double share_of_backward(const std::string& name) {
    if (begins_with(name, "flash_backward_v_256")) return 2.0 / 8;
    if (name.find("_256") != std::string::npos) return 3.0 / 8;
    return name.find("_kv") != std::string::npos ? 4.0 / 7 : 3.0 / 7;
}

// Attention kernels: `shape` is the index of the argument with the shape.
static inline Work attention_kernel(const std::string& name, const Arguments& a, int shape) {
    double t = a.member(shape, 0), heads = a.member(shape, 1), dim = a.member(shape, 3);
    double sequences = a.member(shape + 1, 2) / a.member(shape + 1, 1);
    bool is_backward = name.find("backward") != std::string::npos;
    return {"attention", attention_ns(sequences, heads, t, dim, is_backward) * (is_backward ? share_of_backward(name) : 1)};
}

// Returns the kind and the duration of the kernel `name`, from the bytes that it reads and writes.
static inline Work kernel_work(const std::string& name, const unsigned (&grid)[3], const unsigned (&threads)[3], void** arguments) {
    Arguments a{arguments};
    double rows = grid[0];
    auto is = [&](const char* prefix) { return begins_with(name, prefix); };
    if (is("flash_forward") || is("hopper_forward")) return attention_kernel(name, a, 4);
    if (is("flash_backward") || is("hopper_backward")) return attention_kernel(name, a, 6);
    if (is("attention_delta")) return {"attention", transfer_ns(rows * 32 * grid[1] * grid[2] * a.member(3, 3) * 2 * a.size(1))};
    if (is("adamw")) return {"optimizer", transfer_ns(a.integer(5) * (2 * a.size(0) + a.size(1) + a.size(2) + 16))};
    if (is("sgd") || is("lion")) return {"optimizer", transfer_ns(a.integer(3) * (2 * a.size(0) + a.size(1) + 8))};
    if (is("sum_squares_by_block")) return {"optimizer", transfer_ns(a.integer(2) * a.size(1))};
    if (is("cross_entropy")) return {"classifier", transfer_ns(rows * a.integer(3) * (8 + (a.integer(6) < 0 ? 0 : a.integer(6) == 0 ? 4 : 2)))};
    if (is("cast")) return {"casts and sums", transfer_ns(a.integer(2) * (a.size(0) + a.size(1)))};
    if (is("add_partial_sums")) return {"rows", transfer_ns((a.integer(2) + 2) * a.integer(3) * 4)};
    if (name == "add") return {"casts and sums", transfer_ns(a.integer(2) * (2 * a.size(0) + a.size(1)))};
    if (name == "scale") return {"casts and sums", transfer_ns(a.integer(1) * 2 * a.size(0))};
    if (is("gelu_forward")) return {"rows", transfer_ns(a.integer(2) * (a.size(0) + a.size(1)))};
    if (is("gelu_backward")) return {"rows", transfer_ns(a.integer(3) * (a.size(0) + 2 * a.size(1) + a.size(2)))};
    if (is("swiglu_forward") || is("geglu_forward")) return {"rows", transfer_ns(rows * a.integer(2) * (a.size(0) + 2 * a.size(1)))};
    if (is("swiglu_backward") || is("geglu_backward")) return {"rows", transfer_ns(rows * a.integer(3) * (2 * a.size(0) + 2 * a.size(1) + 2 * a.size(2)))};
    if (is("rope")) return {"rows", transfer_ns(rows * grid[1] * a.integer(3) * a.integer(4) * 4 * a.size(0))};
    if (is("rmsnorm_forward")) return {"rows", transfer_ns(a.integer(5) * a.integer(6) * (a.size(0) + a.size(2) + (a.size(3) > 0 ? a.size(2) + a.size(3) : 0)))};
    if (is("layernorm_forward")) return {"rows", transfer_ns(a.integer(6) * a.integer(7) * (a.size(0) + a.size(2) + (a.size(3) > 0 ? a.size(2) + a.size(3) : 0)), 0.7)};
    if (is("rmsnorm_heads_forward")) return {"rows", transfer_ns(a.member(4, 0) * a.member(4, 1) * (2 * a.size(0) + a.size(1)))};
    if (is("rmsnorm_backward") || is("rmsnorm_heads_backward"))
        return {"rows", transfer_ns(a.member(5, 0) * a.member(5, 1) * (a.size(0) * (a.integer(6) ? 2 : 1) + a.size(1) + a.size(2)))};
    if (is("layernorm_backward")) return {"rows", transfer_ns(a.integer(5) * a.integer(6) * (a.size(0) * (a.integer(7) ? 2 : 1) + a.size(1) + a.size(2)))};
    if (is("sum_rows")) return {"rows", transfer_ns(a.member(4, 0) * a.member(4, 1) * (a.size(1) + a.size(2)))};
    if (is("bias_forward")) return {"rows", transfer_ns(rows * a.integer(2) * 2 * a.size(0))};
    if (is("gather_rows")) return {"rows", transfer_ns(rows * a.integer(3) * (a.size(0) + a.size(1)))};
    if (is("embedding_backward")) return {"rows", transfer_ns(rows * a.integer(5) * (2 * a.size(0) + a.size(1)))};
    // other kernels: 8 elements of 8 bytes per thread
    return {"other", transfer_ns((double)grid[0] * grid[1] * grid[2] * threads[0] * threads[1] * threads[2] * 64)};
}
} // namespace costs
