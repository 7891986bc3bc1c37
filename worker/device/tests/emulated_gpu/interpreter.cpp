// The part of the emulated driver that parses PTX and runs it.
#include "opcodes.hpp"

namespace ptx {
Module parse_module(const char* source) { return Parser(source).module(); }

void run_grid(const Kernel& kernel, const std::vector<uint8_t>& parameters, const unsigned (&grid)[3], const unsigned (&threads)[3], uint32_t dynamic_shared,
              bool (*is_accessible)(uint64_t, size_t), bool backwards) {
    Grid(kernel, parameters, grid, threads, dynamic_shared, is_accessible).run(backwards);
}
} // namespace ptx
