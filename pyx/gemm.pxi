# Linears and experts.
