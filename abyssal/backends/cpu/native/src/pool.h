// A few threads that wait for the next loop. Which thread runs which part never changes a result.
#pragma once

#include <cstdint>
#include <functional>

namespace abyssal {

// Threads that loops may use from now on, the caller's included.
void set_num_threads(int n);
int num_threads();

// Runs body(task) for all tasks in 0 .. count - 1 and returns when all are done. `work` is a rough count of multiply-adds in
// all: small loops run on the caller's thread, because waking another costs more.
void parallel_for(int64_t count, int64_t work, const std::function<void(int64_t)>& body);

// Memory of the calling thread that lasts until its next call with the same index: at least `count` floats, 64-byte aligned.
float* scratch(int index, int64_t count);

}  // namespace abyssal
