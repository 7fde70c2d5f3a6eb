// Fresh memory costs a page fault for every 4 KiB; huge pages make it one for every 2 MiB.
#pragma once

#include <cstdint>

namespace dapo {

void advise_huge_pages(void* data, int64_t bytes);

}  // namespace dapo
