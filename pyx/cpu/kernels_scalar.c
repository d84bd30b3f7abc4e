/* The kernels in plain C, for any machine. */
#include "simd_scalar.h"
#define SET scalar
#include "kernels_body.h"
