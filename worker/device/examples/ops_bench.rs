//! Speed of every op at the shapes of a small Llama, beside what the machine can do at most.
//!
//! `cargo run -p device --release --example ops_bench [-- [THREADS…] [--rows N] [--only TEXT]]`
use device::ops::{AdamW, AttentionShape, ClassifierGrads, NORM_BLOCK, Write};
use device::{Buf, Cpu, Ops};
use std::time::{Duration, Instant};

const HIDDEN: usize = 384;
const INTERMEDIATE: usize = 1024;
const HEADS: usize = 6;
const HEAD_DIM: usize = HIDDEN / HEADS;
const VOCABULARY: usize = 8192;
const SEQUENCE: usize = 256;

fn main() {
    let mut threads = Vec::new();
    let mut rows = vec![SEQUENCE, 8 * SEQUENCE];
    let mut only = String::new();
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--rows" => rows = vec![args.next().and_then(|n| n.parse().ok()).expect("--rows N")],
            "--only" => only = args.next().expect("--only TEXT"),
            n => threads.push(n.parse().expect("a number of threads")),
        }
    }
    if threads.is_empty() {
        threads = vec![1, 2];
    }
    for n in threads {
        let cpu = Cpu::new(n);
        let peak = cpu.measure_peak(Duration::from_millis(300));
        println!(
            "\n{}: FMA peak {:.0} GFLOP/s, memcpy {:.1} GB/s",
            cpu.describe(),
            peak / 1e9,
            memcpy() / 1e9
        );
        for &m in &rows {
            println!("rows {m}");
            let bench = Bench { cpu: &cpu, peak, only: &only, m };
            bench.matmuls();
            bench.attention();
            bench.classifier();
            bench.elementwise();
        }
        println!("scratch {:.1} MiB", cpu.scratch_bytes() as f64 / f64::from(1 << 20));
    }
}

/// Bytes copied per second, 32 MiB at a time.
fn memcpy() -> f64 {
    let (a, mut b) = (random(8 << 20), Buf::zeroed(8 << 20));
    let seconds = best(|| b.host_mut().copy_from_slice(a.host()));
    (a.len() * 4) as f64 / seconds
}

fn random(len: usize) -> Buf {
    let mut b = Buf::zeroed(len);
    let mut state = 1u32;
    for x in b.host_mut() {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        *x = state as f32 / u32::MAX as f32 - 0.5;
    }
    b
}

/// Seconds of the fastest of many runs.
fn best(mut run: impl FnMut()) -> f64 {
    let (begin, mut best, mut runs) = (Instant::now(), f64::INFINITY, 0);
    while runs < 5 || (begin.elapsed() < Duration::from_millis(250) && runs < 1000) {
        let t = Instant::now();
        run();
        best = best.min(t.elapsed().as_secs_f64());
        runs += 1;
    }
    best
}

struct Bench<'a> {
    cpu: &'a Cpu,
    peak: f64,
    only: &'a str,
    m: usize,
}

impl Bench<'_> {
    /// One line for an op that does `flops`.
    fn flops(&self, name: &str, flops: usize, run: impl FnMut()) {
        if name.contains(self.only) {
            let rate = flops as f64 / best(run);
            println!("  {name:34} {:8.1} GFLOP/s  {:5.1} % of peak", rate / 1e9, 100.0 * rate / self.peak);
        }
    }

    /// One line for an op that moves `elements` to and from memory.
    fn bytes(&self, name: &str, elements: usize, run: impl FnMut()) {
        if name.contains(self.only) {
            let seconds = best(run);
            println!(
                "  {name:34} {:8.1} GB/s     {:7.1} µs",
                4e-9 * elements as f64 / seconds,
                1e6 * seconds
            );
        }
    }

    fn matmuls(&self) {
        let (cpu, m) = (self.cpu, self.m);
        let shapes = [
            ("qkv", 3 * HIDDEN, HIDDEN),
            ("o", HIDDEN, HIDDEN),
            ("gate_up", 2 * INTERMEDIATE, HIDDEN),
            ("down", HIDDEN, INTERMEDIATE),
            ("head", VOCABULARY, HIDDEN),
        ];
        for (name, n, k) in shapes {
            let (x, w, dy) = (random(m * k), random(n * k), random(m * n));
            let (mut y, mut dx, mut dw) = (Buf::zeroed(m * n), Buf::zeroed(m * k), Buf::zeroed(n * k));
            let flops = 2 * m * n * k;
            self.flops(&format!("{name} forward"), flops, || {
                cpu.matmul_forward(y.view_mut(), x.view(), w.view(), m, n, k, Write::Set);
            });
            self.flops(&format!("{name} backward input"), flops, || {
                cpu.matmul_backward_input(dx.view_mut(), dy.view(), w.view(), m, n, k, Write::Set);
            });
            self.flops(&format!("{name} backward weight"), flops, || {
                cpu.matmul_backward_weight(dw.view_mut(), dy.view(), x.view(), m, n, k, Write::Add);
            });
        }
    }

    fn attention(&self) {
        let (cpu, m) = (self.cpu, self.m);
        for kv_heads in [HEADS, 2] {
            let shape =
                AttentionShape { b: m / SEQUENCE, t: SEQUENCE, heads: HEADS, kv_heads, head_dim: HEAD_DIM };
            let qkv = random(m * (HEADS + 2 * kv_heads) * HEAD_DIM);
            let d_o = random(m * HIDDEN);
            let (mut o, mut lse) = (Buf::zeroed(m * HIDDEN), Buf::zeroed(HEADS * m));
            let mut dqkv = Buf::zeroed(qkv.len());
            let starts = vec![0; m];
            // The causal half of two products of t × t × head_dim; the backward has five.
            let product = shape.b * HEADS * SEQUENCE * (SEQUENCE + 1) * HEAD_DIM;
            self.flops(&format!("attention forward, {kv_heads} kv heads"), 2 * product, || {
                cpu.attention_forward(o.view_mut(), lse.view_mut(), qkv.view(), &starts, shape);
            });
            self.flops(&format!("attention backward, {kv_heads} kv heads"), 5 * product, || {
                let (o, lse) = (o.view(), lse.view());
                cpu.attention_backward(dqkv.view_mut(), d_o.view(), o, lse, qkv.view(), &starts, shape);
            });
        }
    }

    fn classifier(&self) {
        let (cpu, m, d, v) = (self.cpu, self.m, HIDDEN, VOCABULARY);
        let (x, w) = (random(m * d), random(v * d));
        let labels: Vec<u32> = (0..m).map(|i| (i * 31 % v) as u32).collect();
        let (mut loss, mut dx, mut dw) = (Buf::zeroed(m), Buf::zeroed(m * d), Buf::zeroed(v * d));
        self.flops("classifier forward", 2 * m * d * v, || {
            cpu.classifier(loss.view_mut(), x.view(), w.view(), &labels, m, d, v, None);
        });
        self.flops("classifier forward + backward", 6 * m * d * v, || {
            let (dx, dw) = (dx.view_mut(), dw.view_mut());
            let grads = ClassifierGrads { dx, dw, dw_write: Write::Set, scale: 1.0 };
            cpu.classifier(loss.view_mut(), x.view(), w.view(), &labels, m, d, v, Some(grads));
        });
    }

    fn elementwise(&self) {
        let (cpu, m, d, f) = (self.cpu, self.m, HIDDEN, INTERMEDIATE);
        let (x, w, dy) = (random(m * d), random(d), random(m * d));
        let (mut y, mut rstd) = (Buf::zeroed(m * d), Buf::zeroed(m));
        self.bytes("rmsnorm forward", 2 * m * d, || {
            cpu.rmsnorm_forward(y.view_mut(), rstd.view_mut(), x.view(), w.view(), m, d, 1e-5);
        });
        let mut sum = Buf::zeroed(m * d);
        self.bytes("add + rmsnorm forward", 4 * m * d, || {
            let (y, rstd) = (y.view_mut(), rstd.view_mut());
            cpu.add_rmsnorm_forward(y, rstd, sum.view_mut(), x.view(), w.view(), m, d, 1e-5);
        });
        let (mut dx, mut dw) = (Buf::zeroed(m * d), Buf::zeroed(d));
        self.bytes("rmsnorm backward", 4 * m * d, || {
            let (dxv, dwv) = (dx.view_mut(), dw.view_mut());
            cpu.rmsnorm_backward(dxv, dwv, dy.view(), x.view(), w.view(), rstd.view(), m, d, Write::Add);
        });
        let mut qkv = random(m * 3 * d);
        let (cos, sin) = (random(SEQUENCE * HEAD_DIM / 2), random(SEQUENCE * HEAD_DIM / 2));
        self.bytes("rope forward, q and k", 4 * m * d, || {
            let (b, heads) = (m / SEQUENCE, 2 * HEADS);
            cpu.rope_forward(qkv.view_mut(), cos.view(), sin.view(), b, SEQUENCE, heads, HEAD_DIM, 3 * d);
        });
        let (gate_up, dz) = (random(m * 2 * f), random(m * f));
        let (mut z, mut dgate_up) = (Buf::zeroed(m * f), Buf::zeroed(m * 2 * f));
        self.bytes("swiglu forward", 3 * m * f, || cpu.swiglu_forward(z.view_mut(), gate_up.view(), m, f));
        self.bytes("swiglu backward", 5 * m * f, || {
            cpu.swiglu_backward(dgate_up.view_mut(), dz.view(), gate_up.view(), m, f);
        });
        let table = random(VOCABULARY * d);
        let mut dtable = Buf::zeroed(VOCABULARY * d);
        let tokens: Vec<u32> = (0..m).map(|i| (i * 977 % VOCABULARY) as u32).collect();
        self.bytes("embedding forward", 2 * m * d, || {
            cpu.embedding_forward(y.view_mut(), table.view(), &tokens, d);
        });
        self.bytes("embedding backward", 3 * m * d, || {
            cpu.embedding_backward(dtable.view_mut(), dy.view(), &tokens, d);
        });
        self.flat();
    }

    fn flat(&self) {
        let (cpu, len) = (self.cpu, 2 << 20);
        let (mut p, g) = (random(len), random(len));
        let (mut m, mut v) = (Buf::zeroed(len), Buf::zeroed(len));
        self.bytes("add, 2 Mi elements", 3 * len, || cpu.add(m.view_mut(), g.view()));
        self.bytes("scale", 2 * len, || cpu.scale(m.view_mut(), 0.5));
        let mut norms = vec![0.0; len / NORM_BLOCK];
        self.bytes("norm_blocks", len, || cpu.norm_blocks(&mut norms, g.view()));
        let h = AdamW {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            step: 9,
            grad_scale: 0.5,
        };
        m.host_mut().fill(0.0);
        self.bytes("adamw", 7 * len, || {
            cpu.adamw(p.view_mut(), g.view(), m.view_mut(), v.view_mut(), &h);
        });
    }
}
