//! The cases: each op with its backward on one shape.
use super::{Given, Outcome, Pair, Random, Worst, any, poison, wide};
use crate::Dtype;
use crate::ops::{
    AdamW, AttentionShape, ClassifierGrads, Dropout, Group, HeadRows, IGNORE, LayerNorm, Lion, NORM_BLOCK,
    Ops, RouterGradient, RouterShape, Sgd, StochasticRounding, Write,
};
use std::cell::RefCell;

pub(super) fn products(p: &Pair, seed: u64, m: usize, n: usize, k: usize) -> Outcome {
    let mut worst = Worst::default();
    let mut r = Random::new(seed);
    for write in [Write::Set, Write::Add] {
        let mut output = |len| if write == Write::Add { r.vec(len) } else { poison(len) };
        let outputs = [any(output(m * n)), any(output(m * k)), wide(output(n * k))];
        let given: Vec<Given> =
            outputs.into_iter().chain([any(r.vec(m * k)), any(r.vec(n * k)), any(r.vec(m * n))]).collect();
        worst += p.compare(&format!("matmul {m} {n} {k} {write:?}"), &given, |ops, b| {
            let [y, dx, dw, x, w, dy] = b else { unreachable!("six buffers") };
            ops.matmul_forward(y.view_mut(), x.view(), w.view(), m, n, k, write);
            ops.matmul_backward_input(dx.view_mut(), dy.view(), w.view(), m, n, k, write);
            ops.matmul_backward_weight(dw.view_mut(), dy.view(), x.view(), m, n, k, write);
        })?;
    }
    let outputs = [any(poison(m * n)), any(poison(m * n)), any(poison(m * k))];
    let given = [any(r.vec(m * k)), any(r.vec(n * k)), any(r.vec(n)), wide(r.vec(m * n))];
    let given: Vec<Given> = outputs.into_iter().chain(given).collect();
    worst += p.compare(&format!("matmul with bias {m} {n} {k}"), &given, |ops, b| {
        let [y, turned, dx, x, w, bias, dy] = b else { unreachable!("seven buffers") };
        ops.matmul_bias_forward(y.view_mut(), x.view(), w.view(), Some(bias.view()), m, n, k);
        ops.conv1d_bias_forward(turned.view_mut(), x.view(), w.view(), bias.view(), m, k, n);
        // a gradient that is rounded before its products
        let mut room = ops.zeroed(w.buf.dtype(), m * n);
        let dy = ops.operand(dy.view(), &mut room);
        ops.matmul_backward_input(dx.view_mut(), dy, w.view(), m, n, k, Write::Set);
    })?;
    Ok(worst)
}

pub(super) fn norms(p: &Pair, seed: u64, m: usize, d: usize) -> Outcome {
    let mut worst = Worst::default();
    let mut r = Random::new(seed);
    for write in [Write::Set, Write::Add] {
        let dx = if write == Write::Add { r.vec(m * d) } else { poison(m * d) };
        let given = [
            any(poison(m * d)),
            wide(poison(m)),
            any(r.vec(m * d)),
            any(r.vec(m * d)),
            any(r.vec(d)),
            any(dx),
            wide(r.vec(d)),
            any(r.vec(m * d)),
        ];
        worst += p.compare(&format!("rmsnorm {m} {d}"), &given, |ops, b| {
            let [y, rstd, x, delta, w, dx, dw, dy] = b else { unreachable!("buffers") };
            ops.rmsnorm_forward(y.view_mut(), rstd.view_mut(), x.view(), w.view(), m, d, 1e-5);
            let (out, stat) = (y.view_mut(), rstd.view_mut());
            ops.add_rmsnorm_forward(out, stat, x.view_mut(), delta.view(), w.view(), m, d, 1e-5);
            let grads = (dx.view_mut(), dw.view_mut());
            ops.rmsnorm_backward(grads.0, grads.1, dy.view(), x.view(), w.view(), rstd.view(), m, d, write);
        })?;
        let dx = if write == Write::Add { r.vec(m * d) } else { poison(m * d) };
        let given = [
            any(poison(m * d)),
            wide(poison(2 * m)),
            any(r.vec(m * d)),
            any(r.vec(m * d)),
            any(r.vec(d)),
            any(r.vec(d)),
            any(dx),
            wide(r.vec(d)),
            wide(r.vec(d)),
            any(r.vec(m * d)),
        ];
        worst += p.compare(&format!("layernorm {m} {d}"), &given, |ops, b| {
            let [y, stats, x, delta, w, bias, dx, dw, db, dy] = b else { unreachable!("buffers") };
            // Few elements may be nearly alike: what rounding does to x, the norm makes 1/√eps times as large.
            let eps = if d < 8 { 1e-1 } else { 1e-2 };
            let norm = LayerNorm { w: w.view(), b: bias.view(), eps };
            ops.layernorm_forward(y.view_mut(), stats.view_mut(), x.view(), norm, m);
            ops.add_layernorm_forward(y.view_mut(), stats.view_mut(), x.view_mut(), delta.view(), norm, m);
            let (dx, dw, db) = (dx.view_mut(), dw.view_mut(), db.view_mut());
            ops.layernorm_backward(dx, dw, db, dy.view(), x.view(), w.view(), stats.view(), m, write);
        })?;
    }
    let given = [any(r.vec(m * d)), any(r.vec(d)), wide(r.vec(d)), any(r.vec(m * d))];
    worst += p.compare(&format!("bias {m} {d}"), &given, |ops, b| {
        let [y, bias, dbias, dy] = b else { unreachable!("buffers") };
        ops.bias_forward(y.view_mut(), bias.view(), m, d);
        ops.bias_backward(dbias.view_mut(), dy.view(), m, d);
    })?;
    Ok(worst)
}

pub(super) fn heads(p: &Pair, seed: u64, rows: usize, heads: usize, head_dim: usize, b: usize) -> Outcome {
    let mut worst = Worst::default();
    let mut r = Random::new(seed);
    let (first, t) = (head_dim, rows);
    let stride = heads * head_dim + 2 * head_dim;
    let h = HeadRows { rows, first, heads, head_dim, stride };
    let given = [
        any(r.vec(rows * stride)),
        any(poison(rows * heads * head_dim)),
        wide(poison(rows * heads)),
        any(r.vec(head_dim)),
        any(r.vec(rows * stride)),
        wide(r.vec(head_dim)),
    ];
    worst += p.compare(&format!("norm of heads {h:?}"), &given, |ops, bufs| {
        let [x, raw, rstd, w, dx, dw] = bufs else { unreachable!("buffers") };
        ops.rmsnorm_heads_forward(x.view_mut(), raw.view_mut(), rstd.view_mut(), w.view(), h, 1e-3);
        ops.rmsnorm_heads_backward(dx.view_mut(), dw.view_mut(), raw.view(), rstd.view(), w.view(), h);
    })?;
    let half = head_dim; // pairs of heads twice as wide
    let stride = heads * 2 * half + if half.is_multiple_of(8) { 8 } else { 5 };
    let angles: Vec<f32> = r.vec(t * half);
    let given = [
        any(r.vec(b * t * stride)),
        any(r.vec(b * t * stride)),
        wide(angles.iter().map(|a| a.cos()).collect()),
        wide(angles.iter().map(|a| a.sin()).collect()),
    ];
    worst += p.compare(&format!("rope {b} {t} {heads} {half}"), &given, |ops, bufs| {
        let [x, dx, cos, sin] = bufs else { unreachable!("buffers") };
        ops.rope_forward(x.view_mut(), cos.view(), sin.view(), b, t, heads, 2 * half, stride);
        ops.rope_backward(dx.view_mut(), cos.view(), sin.view(), b, t, heads, 2 * half, stride);
    })?;
    Ok(worst)
}

pub(super) fn activations(p: &Pair, seed: u64, m: usize, f: usize) -> Outcome {
    let mut worst = Worst::default();
    let mut r = Random::new(seed);
    let mut large = |len| r.vec(len).iter().map(|x| x * 9.0).collect::<Vec<_>>();
    let given = [
        any(poison(m * f)),
        any(poison(m * f)),
        any(poison(m * 2 * f)),
        any(poison(m * 2 * f)),
        any(large(m * 2 * f)),
        any(large(m * f)),
        any(large(m * f)),
        any(large(m * f)),
        any(poison(m * f)),
        any(poison(m * f)),
    ];
    worst += p.compare(&format!("activations {m} {f}"), &given, |ops, b| {
        let [silu, gelu, dsilu, dgelu, gate_up, dy, dy_gelu, dy_alone, y, dx] = b else {
            unreachable!("buffers")
        };
        ops.swiglu_forward(silu.view_mut(), gate_up.view(), m, f);
        ops.swiglu_backward(dsilu.view_mut(), dy.view_mut(), gate_up.view(), m, f);
        ops.geglu_forward(gelu.view_mut(), gate_up.view(), m, f);
        ops.geglu_backward(dgelu.view_mut(), dy_gelu.view_mut(), gate_up.view(), m, f);
        ops.gelu_forward(y.view_mut(), gate_up.view().slice(0..m * f));
        ops.gelu_backward(dx.view_mut(), dy_alone.view_mut(), gate_up.view().slice(m * f..2 * m * f));
    })?;
    Ok(worst)
}

/// With documents of random lengths.
pub(super) fn attention(p: &Pair, seed: u64, shape: AttentionShape) -> Outcome {
    let mut r = Random::new(seed);
    let mean = 1 + r.below(100);
    let starts = r.starts(shape.b, shape.t, mean);
    attention_from(p, seed, shape, &starts)
}

/// Every query sees the `window` positions that end with it, as far as they exist.
pub(super) fn windowed_attention(p: &Pair, seed: u64, window: usize, shape: AttentionShape) -> Outcome {
    let starts: Vec<u32> =
        (0..shape.b * shape.t).map(|i| (i % shape.t + 1).saturating_sub(window) as u32).collect();
    attention_from(p, seed, shape, &starts)
}

/// Every query sees a random number of positions.
pub(super) fn ragged_attention(p: &Pair, seed: u64, shape: AttentionShape) -> Outcome {
    let mut r = Random::new(seed);
    let starts: Vec<u32> = (0..shape.b * shape.t).map(|i| r.below(i % shape.t + 1) as u32).collect();
    attention_from(p, seed, shape, &starts)
}

fn attention_from(p: &Pair, seed: u64, shape: AttentionShape, starts: &[u32]) -> Outcome {
    let mut worst = Worst::default();
    let AttentionShape { b, t, heads, kv_heads, head_dim, .. } = shape;
    let mut r = Random::new(seed);
    let qkv = b * t * (heads + 2 * kv_heads) * head_dim;
    let o = b * t * heads * head_dim;
    let given =
        [any(poison(o)), wide(poison(b * heads * t)), any(poison(qkv)), any(r.vec(qkv)), any(r.vec(o))];
    worst += p.compare(&format!("{shape:?}"), &given, |ops, bufs| {
        let [o, lse, dqkv, qkv, d_o] = bufs else { unreachable!("buffers") };
        ops.attention_forward(o.view_mut(), lse.view_mut(), qkv.view(), starts, shape);
        ops.attention_backward(dqkv.view_mut(), d_o.view(), o.view(), lse.view(), qkv.view(), starts, shape);
    })?;
    Ok(worst)
}

pub(super) fn classifier(p: &Pair, seed: u64, m: usize, d: usize, v: usize, cap: Option<f32>) -> Outcome {
    let mut worst = Worst::default();
    let mut r = Random::new(seed);
    let labels: Vec<u32> = (0..m).map(|_| if r.below(5) == 0 { IGNORE } else { r.below(v) as u32 }).collect();
    for dw_write in [Write::Set, Write::Add] {
        let dw = if dw_write == Write::Add { r.vec(v * d) } else { poison(v * d) };
        let given = [
            wide(poison(m)),
            wide(poison(m)),
            any(poison(m * d)),
            wide(dw),
            any(r.vec(m * d)),
            any(r.vec(v * d)),
        ];
        worst += p.compare(&format!("classifier {m} {d} {v} {cap:?}"), &given, |ops, b| {
            let [loss, alone, dx, dw, x, w] = b else { unreachable!("buffers") };
            let grads = ClassifierGrads { dx: dx.view_mut(), dw: dw.view_mut(), dw_write, scale: 0.25 };
            ops.capped_classifier(loss.view_mut(), x.view(), w.view(), &labels, m, d, v, cap, Some(grads));
            ops.capped_classifier(alone.view_mut(), x.view(), w.view(), &labels, m, d, v, cap, None);
        })?;
    }
    Ok(worst)
}

pub(super) fn experts(p: &Pair, seed: u64, m: usize, count: usize, per_token: usize, d: usize) -> Outcome {
    let mut worst = Worst::default();
    let mut r = Random::new(seed);
    let shape = RouterShape { m, experts: count, per_token, normalise: seed.is_multiple_of(2) };
    let (balance, z) = (r.vec(count), 0.3);
    // Whole numbers, so that every type holds them: some are equal.
    let logits: Vec<f32> = (0..m * count).map(|_| r.below(40) as f32 * 0.25).collect();
    let given = [
        wide(poison(m * count)),
        wide(poison(m * per_token)),
        wide(poison(m)),
        any(poison(m * count)),
        any(logits),
        wide(r.vec(m * per_token)),
    ];
    let choices = RefCell::new(Vec::new());
    worst += p.compare(&format!("{shape:?}"), &given, |ops, b| {
        let [probs, weights, lse, dlogits, logits, dweights] = b else { unreachable!("buffers") };
        let mut chosen = vec![u32::MAX; m * per_token];
        ops.router_forward(
            probs.view_mut(),
            weights.view_mut(),
            lse.view_mut(),
            &mut chosen,
            logits.view(),
            shape,
        );
        let given =
            RouterGradient { probs: probs.view(), lse: lse.view(), chosen: &chosen, balance: &balance, z };
        ops.router_backward(dlogits.view_mut(), dweights.view(), given, shape);
        choices.borrow_mut().push(chosen);
    })?;
    let choices = choices.into_inner();
    if choices.iter().any(|c| c != &choices[0]) {
        return Err(format!("{shape:?}: other experts are chosen"));
    }
    let places: Vec<u32> = (0..m * per_token).map(|_| r.below(m) as u32).collect();
    let given = [
        any(poison(m * per_token * d)),
        any(poison(m * d)),
        any(r.vec(m * d)),
        wide(poison(m)),
        any(r.vec(m * d)),
        any(r.vec(m * d)),
        wide(r.vec(m * per_token)),
        wide(r.vec(m)),
    ];
    worst += p.compare(&format!("rows {m} {per_token} {d}"), &given, |ops, b| {
        let [gathered, set, added, dots, x, scaled, weights, factors] = b else { unreachable!("buffers") };
        ops.gather_rows(gathered.view_mut(), x.view(), &places, d);
        ops.combine_rows(set.view_mut(), x.view(), Some(weights.view()), &places, m, d, Write::Set);
        ops.combine_rows(added.view_mut(), x.view(), None, &places, m, d, Write::Add);
        ops.row_dots(dots.view_mut(), x.view(), scaled.view(), d);
        ops.scale_rows(scaled.view_mut(), factors.view(), d);
    })?;
    Ok(worst)
}

pub(super) fn grouped(p: &Pair, seed: u64, sizes: &[usize], n: usize, k: usize) -> Outcome {
    let mut worst = Worst::default();
    let mut r = Random::new(seed);
    let mut groups = Vec::new();
    let (mut at, mut matrix) = (0, 1);
    for &size in sizes {
        groups.push(Group { rows: at..at + size, matrix });
        (at, matrix) = (at + size, matrix + n * k + 2);
    }
    let given = [
        any(poison(at * n)),
        any(poison(at * k)),
        wide(r.vec(matrix)),
        any(r.vec(at * k)),
        any(r.vec(at * n)),
        any(r.vec(matrix)),
    ];
    worst += p.compare(&format!("groups {sizes:?} {n} {k}"), &given, |ops, b| {
        let [y, dx, dw, x, dy, w] = b else { unreachable!("buffers") };
        ops.grouped_forward(y.view_mut(), x.view(), w.view(), &groups, n, k);
        ops.grouped_backward_input(dx.view_mut(), dy.view(), w.view(), &groups, n, k);
        ops.grouped_backward_weight(dw.view_mut(), dy.view(), x.view(), &groups, n, k);
    })?;
    Ok(worst)
}

pub(super) fn embedding(p: &Pair, seed: u64, m: usize, d: usize, v: usize) -> Outcome {
    let mut worst = Worst::default();
    let mut r = Random::new(seed);
    let tokens: Vec<u32> = (0..m).map(|_| r.below(v) as u32).collect();
    let given = [any(poison(m * d)), any(r.vec(v * d)), wide(r.vec(v * d)), any(r.vec(m * d))];
    worst += p.compare(&format!("embedding {m} {d} {v}"), &given, |ops, b| {
        let [x, w, dw, dx] = b else { unreachable!("buffers") };
        ops.embedding_forward(x.view_mut(), w.view(), &tokens, d);
        ops.embedding_backward(dw.view_mut(), dx.view(), &tokens, d);
    })?;
    Ok(worst)
}

pub(super) fn flat(p: &Pair, seed: u64, n: usize) -> Outcome {
    let mut worst = Worst::default();
    let mut r = Random::new(seed);
    let given = [any(r.vec(n)), any(r.vec(n)), any(r.vec(n))];
    let sums = RefCell::new(Vec::new());
    worst += p.compare(&format!("flat {n}"), &given, |ops, b| {
        let [y, x, z] = b else { unreachable!("buffers") };
        ops.add(y.view_mut(), x.view());
        ops.scale(z.view_mut(), -0.75);
        let mut out = vec![f64::NAN; n.div_ceil(NORM_BLOCK)];
        ops.norm_blocks(&mut out, x.view());
        sums.borrow_mut().push(out);
    })?;
    for pair in sums.into_inner().chunks(2) {
        let [want, got] = pair else { unreachable!("both backends") };
        let close = want.iter().zip(got).all(|(w, g)| (w - g).abs() <= w * 1e-12);
        if !close {
            return Err(format!("norm_blocks {n}: {got:?}, not {want:?}"));
        }
    }
    let square = |v: Vec<f32>| v.iter().map(|x| x * x).collect::<Vec<_>>();
    let given = [
        wide(r.vec(n)),
        wide(r.vec(n)),
        wide(r.vec(n)),
        wide(square(r.vec(n))),
        wide(r.vec(n)),
        wide(r.vec(n)),
    ];
    worst += p.compare(&format!("optimizers {n}"), &given, |ops, b| {
        let [p, g, avg, avg_sq, momentum, q] = b else { unreachable!("buffers") };
        for (step, beta1) in [(1, 0.9), (2, 0.3)] {
            let h =
                AdamW { lr: 1e-2, beta1, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step, grad_scale: 0.5 };
            ops.adamw(p.view_mut(), g.view(), avg.view_mut(), avg_sq.view_mut(), &h);
            let h = Lion { lr: 1e-3, beta1, beta2: 0.99, weight_decay: 0.1, grad_scale: 2.0 };
            ops.lion(q.view_mut(), g.view(), avg.view_mut(), &h);
            let h = Sgd { lr: 1e-2, momentum: 0.9, weight_decay: 0.01, grad_scale: 1.5 };
            ops.sgd(p.view_mut(), g.view(), momentum.view_mut(), &h);
            let h = Sgd { momentum: 0.0, weight_decay: 0.0, ..h };
            ops.sgd(q.view_mut(), g.view(), momentum.view_mut().slice(0..0), &h);
        }
    })?;
    worst += vectors(p, &mut r, n)?;
    worst += rounding(p, &mut r, n)?;
    Ok(worst)
}

/// Stochastic rounding, bit by bit: of usual numbers, and of every exponent, infinities and NaN.
fn rounding(p: &Pair, r: &mut Random, n: usize) -> Outcome {
    let values: Vec<f32> = (0..n)
        .map(|i| match i % 3 {
            0 => f32::from_bits((r.next() >> 7) as u32),
            1 => f32::from_bits(0x7f7f_0000 | (r.next() >> 7) as u32 & 0x8000_ffff), // the largest
            _ => r.vec(1)[0],
        })
        .collect();
    let (key, step) = ([n as u32, 11], (1 << 40) + 3);
    for first in [0, 1, 4096, (1 << 34) - 2] {
        let draw = StochasticRounding { key, first, step };
        let run = |ops: &dyn Ops| {
            let (x, mut y) = (ops.device_copy(values[..].into()), ops.zeroed(Dtype::Bf16, n));
            ops.round_stochastically(y.view_mut(), x.view(), &draw);
            ops.host_copy(y.view()).view().halves().to_vec()
        };
        let (want, got) = (run(&p.cpu), run(p.cuda));
        if let Some(at) = (0..n).find(|&i| want[i] != got[i]) {
            let (x, got, want) = (values[at], got[at], want[at]);
            return Err(format!(
                "{x:e} is rounded to {got:#x} on the card, to {want:#x} on the CPU ({draw:?})"
            ));
        }
    }
    Ok(Worst::default())
}

/// What few models and Muon need, and copies inside the backend's memory.
fn vectors(p: &Pair, r: &mut Random, n: usize) -> Outcome {
    let (rows, columns) = (n.isqrt(), n / n.isqrt());
    let sums = RefCell::new(Vec::new());
    let given = [
        wide(r.vec(n)),
        wide(r.vec(n)),
        wide(r.vec(n)),
        wide(poison(n)),
        wide(poison(n)),
        wide(poison(n)),
        any(r.vec(n)),
    ];
    let worst = p.compare(&format!("vectors {n}"), &given, |ops, b| {
        let [x, y, z, turned, copy, none, narrow] = b else { unreachable!("buffers") };
        ops.offset(x.view_mut(), 0.5);
        ops.blend(y.view_mut(), 0.75, x.view(), -1.25);
        ops.softcap(z.view_mut(), 3.0);
        let dropped = Dropout { key: [n as u32, 7], share: 0.3, sample: n.div_ceil(2), first: (1 << 33) + 5 };
        let whole = 0..n / 2 * 2 / dropped.sample * dropped.sample;
        ops.dropout(z.view_mut().slice(whole.clone()), &dropped);
        ops.dropout(narrow.view_mut().slice(whole), &dropped);
        ops.nesterov(x.view_mut(), z.view_mut(), 0.95, 0.5);
        let whole = rows * columns;
        ops.clear(turned.view_mut());
        ops.transpose(turned.view_mut().slice(0..whole), y.view().slice(0..whole), rows, columns);
        ops.copy(copy.view_mut(), x.view());
        ops.move_down(copy.view_mut(), n / 3..n - n / 5, n / 4);
        ops.clear(none.view_mut());
        sums.borrow_mut().push(ops.sum_of_squares(y.view()));
        let parts = [x.view(), y.view().slice(0..n / 2), z.view()];
        sums.borrow_mut().push(ops.norm_blocks_of(&parts).iter().sum());
    })?;
    for both in sums.into_inner().chunks(4) {
        let (want, got) = both.split_at(2);
        if !want.iter().zip(got).all(|(w, g): (&f64, &f64)| (w - g).abs() <= w * 1e-5) {
            return Err(format!("sums of squares {n}: {got:?}, not {want:?}"));
        }
    }
    Ok(worst)
}
