/* What revolve.c lends to the other kernels. */
#ifndef MS_REVOLVE_H
#define MS_REVOLVE_H

#include <stdint.h>

#include "core.h"

/* The codes that ms_revolve_fill writes. */
enum { REVOLVE_ADVANCE, REVOLVE_REVERSE, REVOLVE_SAVE, REVOLVE_LOAD, REVOLVE_FREE };

/* nu(l, s): the fewest forward steps that reverse l steps with s slots; s = 0 counts as 1. */
double revolve_nu(int64_t l, int64_t s);
/* The first of the optimal advances in the middle, l steps with s slots. */
int64_t revolve_first_advance(int64_t l, int64_t s);

#endif
