// Measured f32 FMA peak of this machine: `fma_peak THREADS SECONDS` prints GFLOP/s of all threads together.
// Twelve independent chains of vector FMAs per thread, nothing but registers; the best slice of each thread, so that neighbours
// on a shared machine don't lower the limit.
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
#define CHAINS 12
typedef float vec __attribute__((vector_size(LANES * sizeof(float))));

static double seconds_wanted;
static pthread_barrier_t start;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static void *work(void *result) {
    vec a[CHAINS], x, y;
    for (int l = 0; l < LANES; l++) x[l] = 0.999f, y[l] = 0.001f;
    for (int i = 0; i < CHAINS; i++) a[i] = x * (float)i;
    __asm__ volatile("" : "+v"(x), "+v"(y));
    pthread_barrier_wait(&start);
    double began = now(), best = 0, from, at = began;
    do {
        from = at;
        for (int n = 0; n < 1000000; n++)
#pragma GCC unroll 12
            for (int i = 0; i < CHAINS; i++) {
                a[i] = a[i] * x + y;
                __asm__ volatile("" : "+v"(a[i]));
            }
        at = now();
        double rate = 2.0 * LANES * CHAINS * 1e6 / (at - from) * 1e-9;
        if (rate > best) best = rate;
    } while (at - began < seconds_wanted);
    *(double *)result = best;
    return NULL;
}

int main(int argc, char **argv) {
    int threads = argc > 1 ? atoi(argv[1]) : 1;
    seconds_wanted = argc > 2 ? atof(argv[2]) : 1.0;
    if (threads < 1 || threads > 256) return 2;
    pthread_t thread[256];
    double rate[256], sum = 0;
    pthread_barrier_init(&start, NULL, threads);
    for (int i = 0; i < threads; i++)
        if (pthread_create(&thread[i], NULL, work, &rate[i])) return 1;
    for (int i = 0; i < threads; i++) pthread_join(thread[i], NULL), sum += rate[i];
    printf("%.1f\n", sum);
    return 0;
}
