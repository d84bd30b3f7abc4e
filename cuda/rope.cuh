// Rotary embedding: adjacent pairs of a head's last dims are turned by their position's angles.
//
//   even' = even · cos − odd · sin        odd' = even · sin + odd · cos        (inverse: by −sin)
#pragma once
#include "types.cuh"

template <class T> __device__ __forceinline__ void turn(T& even, T& odd, float cosine, float sine) {
    const T c = (T)cosine, s = (T)sine, turned = even * c - odd * s;
    odd = even * s + odd * c;
    even = turned;
}
