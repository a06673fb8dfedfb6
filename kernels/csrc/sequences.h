/* How the operations that keep a state of each sequence are shared out, behind the products of program.c. */

#define CHANNELS 256 /* of a convolution in one piece */

/* Where the tokens of a sequence and its state begin. */
struct sequence {
    int64_t first, slot;
    int32_t tokens, begins;
};

static struct sequence sequence_of(const qs_step *step, int32_t s)
{
    int32_t first = step->seq_start[s], tokens = step->seq_start[s + 1] - first;
    return (struct sequence){first, step->state_slots[s], tokens, tokens && step->positions[first] == 0};
}

/* A piece is some channels of a sequence. */
static void convolve_piece(const struct job *job, const qs_causal_conv *op, int32_t s, int32_t piece)
{
    struct sequence at = sequence_of(job->step, s);
    int32_t first = piece * CHANNELS, last = op->channels - first < CHANNELS ? op->channels : first + CHANNELS;
    if (at.tokens)
        job->kernels->convolve(op, op->x + at.first * op->x_stride, op->state + at.slot * (op->width - 1) * op->channels,
                               at.tokens, at.begins, first, last);
}

/* A piece is a head of a sequence. */
static void delta_piece(const struct job *job, const qs_gated_delta *op, int32_t s, int32_t head)
{
    struct sequence at = sequence_of(job->step, s);
    if (at.tokens)
        job->kernels->delta(op, op->x + at.first * qs_delta_width(op), op->out + at.first * op->heads * op->value_dim,
                            op->state + (at.slot * op->heads + head) * op->key_dim * op->value_dim, at.tokens, at.begins,
                            head);
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
