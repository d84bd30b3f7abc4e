/* Every row kernel by name: ROW_KERNEL(name), one per line; its body is FN(name). */
