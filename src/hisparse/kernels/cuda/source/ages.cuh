// How long ago a hot row was read, in coarse bins: the rows of the largest bins go first.
#pragma once
#include "base.cuh"

constexpr i32 DIGIT_BITS = 10;
constexpr i32 BINS = 1 << DIGIT_BITS;
constexpr u32 NO_BIN = 0;            // not a candidate: read by this step, or without a block
constexpr u32 OLD_BIN = BINS - 2;    // this age and every larger one
constexpr u32 EMPTY_BIN = BINS - 1;  // holds nothing: older than any other

__device__ __forceinline__ u32 bin_of(bool is_excluded, i32 position, i32 stamp, i32 now) {
  const u32 age = static_cast<u32>(now) - static_cast<u32>(stamp);
  const u32 bin = position < 0 ? EMPTY_BIN : min(max(age, 1u), OLD_BIN);
  return is_excluded ? NO_BIN : bin;
}
