/* Random gathers by several callers at once, compared byte by byte: for the sanitizers. Status 1 at the first difference. */
#include "gather.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SIZE (2 << 20)
#define PIECES 4
#define STEPS 6
#define CALLERS 2

static uint8_t data[SIZE];
static int fd;

static uint64_t next(uint64_t *seed)
{
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return *seed >> 33;
}

static void *caller(void *arg)
{
    uint64_t seed = (uint64_t)(intptr_t)arg;
    static uint8_t buffers[CALLERS][PIECES * SIZE / 2];
    uint8_t *buffer = buffers[seed - 1];
    for (int step = 0; step < STEPS; step++) {
        struct piece pieces[PIECES];
        memset(buffer, 0xA5, sizeof buffers[0]);
        for (int i = 0; i < PIECES; i++) {
            const int64_t bytes = 1 + (int64_t)(next(&seed) % 4000), pitch = bytes + (int64_t)(next(&seed) % 3 * 700);
            const int64_t rows = 1 + (int64_t)(next(&seed) % (uint64_t)(SIZE / 4 / pitch));
            const int64_t offset = (int64_t)(next(&seed) % (uint64_t)(SIZE - rows * pitch));
            pieces[i] = (struct piece){fd, 1, offset, pitch, rows, bytes, buffer + i * (SIZE / 2)};
        }
        const struct fault fault = gather(pieces, PIECES, 1 + step % 4);
        if (fault.kind != GATHER_DONE) return "fault";
        for (int i = 0; i < PIECES; i++)
            for (int64_t r = 0; r < pieces[i].rows; r++)
                if (memcmp(pieces[i].to + r * pieces[i].bytes, data + pieces[i].offset + r * pieces[i].pitch,
                           (size_t)pieces[i].bytes))
                    return "other bytes";
        pieces[PIECES - 1].offset = SIZE; /* nothing there */
        if (gather(pieces, PIECES, 4).kind != GATHER_SHORT) return "no fault";
    }
    return NULL;
}

int main(void)
{
    char name[] = "/tmp/gather-XXXXXX";
    fd = mkstemp(name);
    unlink(name);
    for (int i = 0; i < SIZE; i++) data[i] = (uint8_t)((i * 2654435761u >> 13) % 255);
    if (write(fd, data, SIZE) != SIZE) return 2;
    pthread_t threads[CALLERS];
    int failed = 0;
    for (intptr_t i = 0; i < CALLERS; i++) pthread_create(&threads[i], NULL, caller, (void *)(i + 1));
    for (int i = 0; i < CALLERS; i++) {
        void *words;
        pthread_join(threads[i], &words);
        if (words) failed = 1, printf("%s\n", (char *)words);
    }
    return failed;
}
