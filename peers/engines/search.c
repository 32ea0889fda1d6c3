#include <stdint.h>

enum { QUADS = 64 };  /* Philox4x32-10 of this many counters at once, in vector registers */

int64_t search(uint32_t key_0, uint32_t key_1, uint32_t row, uint32_t position, int64_t size,
               uint32_t limit, int64_t *tokens, uint32_t *words)
{
    int64_t count = 0;
    for (int64_t first = 0; first < (size + 3) / 4; first += QUADS) {
        uint32_t word[4][QUADS], x = key_0, y = key_1, low[QUADS / 8];
        for (int i = 0; i < QUADS; i++) {
            word[0][i] = (uint32_t)(first + i);
            word[1][i] = position;
            word[2][i] = row;
            word[3][i] = 0;
        }
        for (int round = 0; round < 10; round++) {
            for (int i = 0; i < QUADS; i++) {
                uint64_t p = (uint64_t)word[0][i] * 0xD2511F53u;
                uint64_t q = (uint64_t)word[2][i] * 0xCD9E8D57u;
                word[0][i] = (uint32_t)(q >> 32) ^ word[1][i] ^ x;
                word[2][i] = (uint32_t)(p >> 32) ^ word[3][i] ^ y;
                word[1][i] = (uint32_t)q;
                word[3][i] = (uint32_t)p;
            }
            x += 0x9E3779B9u;
            y += 0xBB67AE85u;
        }
        for (int part = 0; part < QUADS / 8; part++) {
            low[part] = 0;
            for (int i = 8 * part; i < 8 * part + 8; i++)
                low[part] |= (word[0][i] <= limit) | (word[1][i] <= limit)
                           | (word[2][i] <= limit) | (word[3][i] <= limit);
        }
        for (int part = 0; part < QUADS / 8; part++) {
            if (!low[part])
                continue;
            for (int i = 8 * part; i < 8 * part + 8; i++)
                for (int j = 0; j < 4; j++) {
                    int64_t token = 4 * (first + i) + j;
                    if (word[j][i] <= limit && token < size) {
                        tokens[count] = token;
                        words[count++] = word[j][i];
                    }
                }
        }
    }
    return count;
}
