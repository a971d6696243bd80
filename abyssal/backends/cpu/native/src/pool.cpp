#include "pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <unistd.h>
#include <vector>

namespace abyssal {

namespace {

constexpr std::chrono::microseconds PATIENCE(50);  // the next loop of a decode step comes sooner than that

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Waits a short while for `ready`, without giving up the processor; says whether it came about.
template <class Ready>
bool spin(const Ready& ready) {
    const auto end = std::chrono::steady_clock::now() + PATIENCE;
    do {
        for (int i = 0; i < 16; i++) {
            if (ready()) return true;
            pause();
        }
    } while (std::chrono::steady_clock::now() < end);
    return ready();
}

class Pool {
public:
    ~Pool() { resize(1); }

    void resize(int n) {
        std::lock_guard<std::mutex> serial(run_mutex_);
        if (n == size_ && owner_ == getpid()) return;
        stop();
        owner_ = getpid();
        size_ = n;
        stopping_ = false;
        for (int i = 1; i < n; i++) workers_.emplace_back([this, seen = generation_.load()] { serve(seen); });
    }

    int size() const { return size_.load(std::memory_order_relaxed); }

    void run(int64_t count, const std::function<void(int64_t)>& body) {
        // one loop at a time: engines in several threads take turns
        std::lock_guard<std::mutex> serial(run_mutex_);
        if (owner_ != getpid()) {  // the threads did not survive a fork
            for (int64_t i = 0; i < count; i++) body(i);
            return;
        }
        body_ = &body;
        count_ = count;
        next_.store(0, std::memory_order_relaxed);
        open_.store(true);
        {
            std::lock_guard<std::mutex> lock(sleep_mutex_);
            generation_.fetch_add(1, std::memory_order_release);
        }
        if (sleeping_.load(std::memory_order_acquire) > 0) wake_.notify_all();
        drain();
        // Nobody is waited for who has not begun: on a busy machine a thread may get its processor only milliseconds later.
        // A worker announces itself before it looks whether the loop is open, so one of the two sees the other.
        open_.store(false);
        while (!spin([&] { return inside_.load() == 0; })) std::this_thread::yield();
    }

private:
    void drain() {
        for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) (*body_)(i);
    }

    void serve(uint64_t seen) {
        for (;;) {
            if (!spin([&] { return generation_.load(std::memory_order_acquire) != seen; })) {
                std::unique_lock<std::mutex> lock(sleep_mutex_);
                sleeping_.fetch_add(1);
                wake_.wait(lock, [&] { return generation_.load(std::memory_order_acquire) != seen; });
                sleeping_.fetch_sub(1);
            }
            seen = generation_.load(std::memory_order_acquire);
            if (stopping_) return;
            inside_.fetch_add(1);
            if (open_.load()) drain();
            inside_.fetch_sub(1);
        }
    }

    void stop() {
        if (workers_.empty()) return;
        if (owner_ != getpid()) {  // threads of the parent: nothing to join here, and nothing may be destroyed
            new std::vector<std::thread>(std::move(workers_));
            workers_.clear();
            return;
        }
        {
            std::lock_guard<std::mutex> lock(sleep_mutex_);
            stopping_ = true;
            generation_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        for (auto& worker : workers_) worker.join();
        workers_.clear();
    }

    std::vector<std::thread> workers_;
    std::mutex run_mutex_, sleep_mutex_;
    std::condition_variable wake_;
    std::atomic<uint64_t> generation_{0};
    std::atomic<int64_t> next_{0};
    std::atomic<int> inside_{0}, sleeping_{0};
    std::atomic<bool> open_{false};
    const std::function<void(int64_t)>* body_ = nullptr;
    int64_t count_ = 0;
    std::atomic<int> size_{1};
    pid_t owner_ = getpid();
    bool stopping_ = false;
};

Pool& pool() {
    static Pool* instance = new Pool;  // never destroyed: threads may outlive static destruction
    return *instance;
}

constexpr int64_t SCRATCH_KEPT = 1 << 20;  // floats

float* allocate(int64_t count) {
    void* data = std::aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64);
    if (data == nullptr) throw std::bad_alloc();
    return static_cast<float*>(data);
}

struct Aligned {
    float* data = nullptr;
    int64_t size = 0;
    ~Aligned() { std::free(data); }
};

}  // namespace

void set_num_threads(int n) { pool().resize(std::max(1, n)); }

int num_threads() { return pool().size(); }

void run_in_pool(int64_t count, const std::function<void(int64_t)>& body) { pool().run(count, body); }

float* scratch(int index, int64_t count) {
    thread_local Aligned buffers[4];
    Aligned& buffer = buffers[index];
    if (buffer.size < count) {
        std::free(buffer.data);
        buffer.data = nullptr;
        buffer.size = (count + 1023) / 1024 * 1024;
        buffer.data = allocate(buffer.size);
    }
    return buffer.data;
}

Workspace::Workspace(int index, int64_t count)
    : data_(count <= SCRATCH_KEPT ? scratch(index, count) : allocate(count)),
      owned_(count <= SCRATCH_KEPT ? nullptr : data_) {}

Workspace::~Workspace() { std::free(owned_); }

}  // namespace abyssal
