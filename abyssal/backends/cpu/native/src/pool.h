// A few threads that wait for the next loop. Which thread runs which part never changes a result.
#pragma once

#include <cstdint>
#include <functional>

namespace abyssal {

// Threads that loops may use from now on, the caller's included.
void set_num_threads(int n);
int num_threads();

// Runs body(task) for all tasks in 0 .. count - 1 and returns when all are done. `work` is a rough count of multiply-adds in
// all: small loops run on the caller's thread, because handing them out costs more.
template <class Body>
void parallel_for(int64_t count, int64_t work, const Body& body);

// Memory of the calling thread that lasts until its next call with the same index: at least `count` floats, 64-byte aligned.
float* scratch(int index, int64_t count);

// `count` floats, 64-byte aligned: scratch if they are few, otherwise memory that is given back at the end.
class Workspace {
public:
    Workspace(int index, int64_t count);
    ~Workspace();
    Workspace(const Workspace&) = delete;
    float* data() const { return data_; }

private:
    float *data_, *owned_;
};

constexpr int64_t WORK_PER_THREAD = 40000;  // about as many multiply-adds as a hand-over costs

void run_in_pool(int64_t count, const std::function<void(int64_t)>& body);

template <class Body>
void parallel_for(int64_t count, int64_t work, const Body& body) {
    if (count < 2 || work < 2 * WORK_PER_THREAD || num_threads() < 2) {
        for (int64_t i = 0; i < count; i++) body(i);
        return;
    }
    run_in_pool(count, std::cref(body));
}

}  // namespace abyssal
