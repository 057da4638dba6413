/* Which sources the core was compiled from, so that a stale one is noticed when it is loaded. */
#include "core.h"

#ifndef MULTISTAGE_SOURCES
#define MULTISTAGE_SOURCES 0
#endif

int64_t ms_sources(void)
{
    return MULTISTAGE_SOURCES;
}
