// Loops over the lanes of a warp, which a mask of 32 bits selects.
#pragma once
#include <algorithm>
#include <cstdint>
#include <utility>

namespace ptx {
constexpr uint32_t ALL = 0xffffffffu;

// Calls `f` with the number of each of these lanes.
template <class F> inline void each_lane(uint32_t lanes, F f) {
    if (lanes == ALL) {
        for (int l = 0; l < 32; l++) f(l);
        return;
    }
    for (; lanes; lanes &= lanes - 1) f(__builtin_ctz(lanes));
}
// Like each_lane, for an `f` whose calls do not affect each other. The compiler may run them at once.
template <class F> inline void each_separate_lane(uint32_t lanes, F f) {
    if (lanes == ALL) {
#pragma GCC ivdep
        for (int l = 0; l < 32; l++) f(l);
        return;
    }
    for (; lanes; lanes &= lanes - 1) f(__builtin_ctz(lanes));
}
// Returns the lowest byte and the end of the accesses by some lanes.
inline std::pair<uint64_t, uint64_t> span_of_lanes(uint32_t lanes, const uint64_t (&at)[32], uint32_t bytes) {
    uint64_t begin = UINT64_MAX, end = 0;
    each_lane(lanes, [&](int l) { begin = std::min(begin, at[l]), end = std::max(end, at[l] + bytes); });
    return {begin, end};
}
} // namespace ptx
