/* Argument structs of the row kernels. */
#pragma once
