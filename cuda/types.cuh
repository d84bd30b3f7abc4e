// Names of plain types, and constants NVRTC has no header for. Needs no include on a device.
#pragma once

typedef signed char i8;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

#define FULL_MASK 0xffffffffu

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }
