# Everything that is not a linear or an expert.
#
# A row kernel is a body FN(name) included from cpu/rows.h, its argument struct in cpu/rows_args.h, a line
# ROW_KERNEL(name) in cpu/rows_kernels.h and a field `team_fn name` of `struct kernels` in cpu.pyx. It is called as
# team.run(team.kernels.name, &args, team.share(work)).
