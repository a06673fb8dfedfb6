/* How the operations that keep a state of each sequence are shared out, behind the products of program.c. */

#define CHANNELS 256 /* of a convolution in one piece */

/* Tokens of a sequence that follow each other, and its state. Behind the last of them the state is copied to the slot
 * `saved`, unless that is -1. */
struct stretch {
    int64_t first, slot, saved;
    int32_t tokens, begins;
};

/* The tokens of sequence s from `first` to its end, or to the first one behind which its state is saved. */
static struct stretch stretch_from(const qs_step *step, int32_t s, int32_t first)
{
    const int32_t end = step->seq_start[s + 1], *saves = step->state_saves;
    int32_t next = saves ? first : end;
    while (next < end && saves[next++] < 0)
        ;
    return (struct stretch){first, step->state_slots[s], saves && next > first ? saves[next - 1] : -1, next - first,
                         first < end && step->positions[first] == 0};
}

/* A piece is some channels of a sequence. */
static void convolve_piece(const struct job *job, const qs_causal_conv *op, int32_t s, int32_t piece)
{
    const int32_t first = piece * CHANNELS, held = op->width - 1;
    const int32_t last = op->channels - first < CHANNELS ? op->channels : first + CHANNELS;
    for (int32_t begin = job->step->seq_start[s]; begin < job->step->seq_start[s + 1];) {
        struct stretch at = stretch_from(job->step, s, begin);
        float *state = op->state + at.slot * held * op->channels;
        job->kernels->convolve(op, op->x + at.first * op->x_stride, state, at.tokens, at.begins, first, last);
        for (int32_t j = 0; at.saved >= 0 && j < held; j++)
            memcpy(op->state + (at.saved * held + j) * op->channels + first, state + (int64_t)j * op->channels + first,
                   sizeof(float) * (size_t)(last - first));
        begin += at.tokens;
    }
}

/* A piece is a head of a sequence. */
static void delta_piece(const struct job *job, const qs_gated_delta *op, int32_t s, int32_t head)
{
    const int64_t size = (int64_t)op->key_dim * op->value_dim;
    for (int32_t begin = job->step->seq_start[s]; begin < job->step->seq_start[s + 1];) {
        struct stretch at = stretch_from(job->step, s, begin);
        float *state = op->state + (at.slot * op->heads + head) * size;
        job->kernels->delta(op, op->x + at.first * qs_delta_width(op), op->out + at.first * op->out_stride,
                            state, at.tokens, at.begins, head);
        if (at.saved >= 0)
            memcpy(op->state + (at.saved * op->heads + head) * size, state, sizeof(float) * (size_t)size);
        begin += at.tokens;
    }
}

static void run_sequences(const struct job *job, qs_pool *pool, struct phase *phase, const qs_op *op)
{
    int32_t convolves = op->kind == QS_CAUSAL_CONV, mine = 0;
    int32_t each = convolves ? (op->causal_conv.channels + CHANNELS - 1) / CHANNELS : op->gated_delta.heads;
    int32_t pieces = job->step->sequences * each;
    for (int32_t ticket; (ticket = take(phase)) < pieces; mine++) {
        int32_t piece = spread(ticket, pieces, pool->threads);
        if (convolves)
            convolve_piece(job, &op->causal_conv, piece / each, piece % each);
        else
            delta_piece(job, &op->gated_delta, piece / each, piece % each);
    }
    settle(pool, phase, pieces, mine);
}
