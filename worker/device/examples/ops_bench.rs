//! Measures the speed of every op of the CPU backend with the shapes of a small Llama model, next
//! to the machine's peak arithmetic rate.
//!
//! `cargo run -p device --release --example ops_bench [-- [THREADS…] [--rows N] [--only TEXT]
//! [--level NAME] [--bf16]]`
mod peak_flops;

use device::ops::{
    ActivationOps, AdamWHyperparams, AttentionOps, AttentionShape, ClassifierGrads, ClassifierOps,
    ClassifierShape, EmbeddingOps, GroupedMatmulOps, MatmulOps, NORM_BLOCK_LEN, OptimizerOps, RmsNormOps,
    RopeOps, RopeShape, RowGroup, VectorOps, WriteMode,
};
use device::{Buf, Cpu, Dtype};
use peak_flops::{measure_amx_peak_flops, measure_peak_flops};
use std::time::{Duration, Instant};

const HIDDEN: usize = 384;
const INTERMEDIATE: usize = 1024;
const HEADS: usize = 6;
const HEAD_DIM: usize = HIDDEN / HEADS;
const EXPERTS: usize = 8;
const VOCABULARY: usize = 8192;
const SEQUENCE_LEN: usize = 256;
const LAYERS: usize = 6;

fn main() {
    let mut threads = Vec::new();
    let mut rows = vec![SEQUENCE_LEN, 8 * SEQUENCE_LEN];
    let (mut only, mut level, mut dtype) = (String::new(), String::new(), Dtype::F32);
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--rows" => rows = vec![args.next().and_then(|n| n.parse().ok()).expect("--rows N")],
            "--only" => only = args.next().expect("--only TEXT"),
            "--level" => level = args.next().expect("--level NAME"),
            "--bf16" => dtype = Dtype::Bf16,
            n => threads.push(n.parse().expect("a number of threads")),
        }
    }
    if threads.is_empty() {
        threads = vec![1, 2];
    }
    for n in threads {
        let fits = |cpu: &Cpu| cpu.describe().starts_with(&level);
        let cpu = Cpu::new_for_all_instruction_sets(n)
            .into_iter()
            .find(fits)
            .expect("an instruction set of this machine");
        let peak = measure_peak_flops(&cpu.describe(), n, Duration::from_millis(300));
        println!(
            "\n{}: FMA peak {:.0} GFLOP/s, memcpy {:.1} GB/s",
            cpu.describe(),
            peak / 1e9,
            measure_memcpy() / 1e9
        );
        let amx_peak = measure_amx_peak_flops(&cpu.describe(), n, Duration::from_millis(300));
        match amx_peak {
            Some(amx_peak) => println!("AMX: bf16 peak {:.0} GFLOP/s", amx_peak / 1e9),
            None => println!("AMX: not available"),
        }
        for &m in &rows {
            println!("rows {m}");
            let ops_bench = OpsBench { cpu: &cpu, peak, only: &only, m, dtype };
            ops_bench.bench_matmuls();
            ops_bench.bench_experts();
            ops_bench.bench_attention();
            ops_bench.bench_classifier();
            ops_bench.bench_row_ops();
            if "step".contains(&only) {
                TrainingStepBench::new(&cpu, m).measure_and_report(peak);
            }
        }
        println!("scratch {:.1} MiB", cpu.scratch_bytes() as f64 / f64::from(1 << 20));
    }
}

/// Measures the memory bandwidth of memcpy, with copies of 32 MiB. Returns the number of bytes
/// copied per second.
fn measure_memcpy() -> f64 {
    let (a, mut b) = (make_random_buf(8 << 20), Buf::zeroed(8 << 20));
    let seconds = measure_fastest_run(|| b.host_slice_mut().copy_from_slice(a.host_slice()));
    (a.len() * 4) as f64 / seconds
}

/// Benchmark of a whole training step: forward pass, backward pass and optimizer update of a model.
struct TrainingStepBench<'a> {
    cpu: &'a Cpu,
    shape: AttentionShape,
    starts: Vec<u32>,
    tokens: Vec<u32>,
    cos: Buf,
    sin: Buf,
    layers: Vec<TransformerLayer>,
    head: TrainedWeight,
    /// The residual stream (`x`), the output of a branch of a block, and their gradients.
    x: Buf,
    branch: Buf,
    dx: Buf,
    dbranch: Buf,
    dqkv: Buf,
    dgate_up: Buf,
    loss: Buf,
}

/// A trained parameter in the benchmark, with its gradient and AdamW's two moving averages (of the
/// gradient and of the squared gradient).
struct TrainedWeight {
    w: Buf,
    dw: Buf,
    avg: Buf,
    avg_sq: Buf,
}

impl TrainedWeight {
    fn new(len: usize) -> Self {
        let (avg, avg_sq) = (Buf::zeroed(len), Buf::zeroed(len));
        TrainedWeight { w: make_random_buf(len), dw: Buf::zeroed(len), avg, avg_sq }
    }
}

/// Parameters of one transformer layer, and the activations that the layer's backward pass needs.
struct TransformerLayer {
    norms: [TrainedWeight; 2],
    matrices: [TrainedWeight; 4],
    inputs: [Buf; 2],
    normed: [Buf; 2],
    rstd: [Buf; 2],
    qkv: Buf,
    o: Buf,
    lse: Buf,
    gate_up: Buf,
    activated: Buf,
}

/// The shapes (outputs, inputs) of the four weight matrices of a transformer layer: qkv projection,
/// output projection, gate and up projection, and down projection.
const LAYER_WEIGHT_SHAPES: [(usize, usize); 4] =
    [(3 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)];

impl<'a> TrainingStepBench<'a> {
    fn new(cpu: &'a Cpu, m: usize) -> Self {
        let layer = |_| TransformerLayer {
            norms: [(); 2].map(|()| TrainedWeight::new(HIDDEN)),
            matrices: LAYER_WEIGHT_SHAPES.map(|(n, k)| TrainedWeight::new(n * k)),
            inputs: [(); 2].map(|()| make_random_buf(m * HIDDEN)),
            normed: [(); 2].map(|()| Buf::zeroed(m * HIDDEN)),
            rstd: [(); 2].map(|()| Buf::zeroed(m)),
            qkv: Buf::zeroed(m * 3 * HIDDEN),
            o: Buf::zeroed(m * HIDDEN),
            lse: Buf::zeroed(m * HEADS),
            gate_up: Buf::zeroed(m * 2 * INTERMEDIATE),
            activated: Buf::zeroed(m * INTERMEDIATE),
        };
        let [x, branch, dx, dbranch] = [(); 4].map(|()| Buf::zeroed(m * HIDDEN));
        TrainingStepBench {
            cpu,
            shape: AttentionShape::new(m / SEQUENCE_LEN, SEQUENCE_LEN, HEADS, HEADS, HEAD_DIM),
            starts: vec![0; m],
            tokens: (0..m).map(|i| (i * 977 % VOCABULARY) as u32).collect(),
            cos: make_random_buf(SEQUENCE_LEN * HEAD_DIM / 2),
            sin: make_random_buf(SEQUENCE_LEN * HEAD_DIM / 2),
            layers: (0..LAYERS).map(layer).collect(),
            head: TrainedWeight::new(VOCABULARY * HIDDEN),
            x,
            branch,
            dx,
            dbranch,
            dqkv: Buf::zeroed(m * 3 * HIDDEN),
            dgate_up: Buf::zeroed(m * 2 * INTERMEDIATE),
            loss: Buf::zeroed(m),
        }
    }

    /// Runs the training step many times and prints the time of its passes and the rate in tokens
    /// per second. `peak` is the machine's peak in FLOP/s.
    fn measure_and_report(&mut self, peak: f64) {
        let m = self.tokens.len();
        let matrices: usize =
            LAYERS * LAYER_WEIGHT_SHAPES.iter().map(|(n, k)| n * k).sum::<usize>() + VOCABULARY * HIDDEN;
        let attention = LAYERS * self.shape.b * HEADS * SEQUENCE_LEN * (SEQUENCE_LEN + 1) * HEAD_DIM;
        let flops = (6 * m * matrices + 7 * attention) as f64;
        let seconds = measure_fastest_run(|| {
            self.run_forward();
            self.run_backward();
        });
        let update = measure_fastest_run(|| self.update_weights());
        let rate = flops / seconds;
        println!(
            "  step: forward + backward {:.1} ms, {:.1} GFLOP/s, {:.1} % of peak, {:.0} tokens/s; update {:.1} ms",
            1e3 * seconds,
            rate / 1e9,
            100.0 * rate / peak,
            m as f64 / seconds,
            1e3 * update
        );
    }

    /// Runs the forward pass of all layers, and then computes the logits, the cross-entropy loss,
    /// and the gradients of the output layer.
    fn run_forward(&mut self) {
        let (cpu, m, d, f) = (self.cpu, self.tokens.len(), HIDDEN, INTERMEDIATE);
        cpu.embedding_forward(self.x.view_mut(), self.head.w.view(), &self.tokens, d);
        self.branch.host_slice_mut().fill(0.0);
        for l in &mut self.layers {
            let [qkv, o, gate_up, down] = &l.matrices;
            for half in 0..2 {
                let (normed, rstd) = (l.normed[half].view_mut(), l.rstd[half].view_mut());
                let norm = l.norms[half].w.view();
                cpu.add_rmsnorm_forward(
                    normed,
                    rstd,
                    self.x.view_mut(),
                    self.branch.view(),
                    norm,
                    m,
                    d,
                    1e-5,
                );
                l.inputs[half].host_slice_mut().copy_from_slice(self.x.host_slice());
                let normed = l.normed[half].view();
                if half == 0 {
                    cpu.matmul_forward(
                        l.qkv.view_mut(),
                        normed,
                        qkv.w.view(),
                        m,
                        3 * d,
                        d,
                        WriteMode::Overwrite,
                    );
                    let (cos, sin) = (self.cos.view(), self.sin.view());
                    let AttentionShape { b, t, .. } = self.shape;
                    let shape = RopeShape { b, t, heads: 2 * HEADS, head_dim: HEAD_DIM, stride: 3 * d };
                    cpu.rope_forward(l.qkv.view_mut(), cos, sin, shape);
                    let (out, lse) = (l.o.view_mut(), l.lse.view_mut());
                    cpu.attention_forward(out, lse, l.qkv.view(), &self.starts, self.shape);
                    cpu.matmul_forward(
                        self.branch.view_mut(),
                        l.o.view(),
                        o.w.view(),
                        m,
                        d,
                        d,
                        WriteMode::Overwrite,
                    );
                } else {
                    cpu.matmul_forward(
                        l.gate_up.view_mut(),
                        normed,
                        gate_up.w.view(),
                        m,
                        2 * f,
                        d,
                        WriteMode::Overwrite,
                    );
                    cpu.swiglu_forward(l.activated.view_mut(), l.gate_up.view(), m, f);
                    let (y, x) = (self.branch.view_mut(), l.activated.view());
                    cpu.matmul_forward(y, x, down.w.view(), m, d, f, WriteMode::Overwrite);
                }
            }
        }
        cpu.add(self.x.view_mut(), self.branch.view());
        let (dx, dw) = (self.dx.view_mut(), self.head.dw.view_mut());
        let grads = ClassifierGrads { dx, dw, dw_write: WriteMode::Overwrite, scale: 1.0 / m as f32 };
        let (x, w) = (self.x.view(), self.head.w.view());
        let shape = ClassifierShape { m, d, v: VOCABULARY, softcap: None };
        cpu.compute_classifier_loss(self.loss.view_mut(), x, w, &self.tokens, shape, Some(grads));
    }

    /// Runs the backward pass of all layers, beginning with the gradient that the output layer has
    /// computed for the last layer.
    fn run_backward(&mut self) {
        let (cpu, m, d, f) = (self.cpu, self.tokens.len(), HIDDEN, INTERMEDIATE);
        for l in self.layers.iter_mut().rev() {
            for half in [1, 0] {
                let [qkv, o, gate_up, down] = &mut l.matrices;
                let dy = self.dx.view();
                let (first, n) = if half == 1 {
                    let hidden = l.activated.view();
                    cpu.matmul_backward_weight(down.dw.view_mut(), dy, hidden, m, d, f, WriteMode::Overwrite);
                    // The activations themselves are not needed any more.
                    cpu.matmul_backward_input(
                        l.activated.view_mut(),
                        dy,
                        down.w.view(),
                        m,
                        d,
                        f,
                        WriteMode::Overwrite,
                    );
                    let dhidden = l.activated.view_mut();
                    cpu.swiglu_backward(self.dgate_up.view_mut(), dhidden, l.gate_up.view(), m, f);
                    (gate_up, 2 * f)
                } else {
                    cpu.matmul_backward_weight(
                        o.dw.view_mut(),
                        dy,
                        l.o.view(),
                        m,
                        d,
                        d,
                        WriteMode::Overwrite,
                    );
                    cpu.matmul_backward_input(
                        self.branch.view_mut(),
                        dy,
                        o.w.view(),
                        m,
                        d,
                        d,
                        WriteMode::Overwrite,
                    );
                    let (d_o, out, lse) = (self.branch.view(), l.o.view(), l.lse.view());
                    let dqkv = self.dqkv.view_mut();
                    cpu.attention_backward(dqkv, d_o, out, lse, l.qkv.view(), &self.starts, self.shape);
                    let (cos, sin) = (self.cos.view(), self.sin.view());
                    let AttentionShape { b, t, .. } = self.shape;
                    let shape = RopeShape { b, t, heads: 2 * HEADS, head_dim: HEAD_DIM, stride: 3 * d };
                    cpu.rope_backward(self.dqkv.view_mut(), cos, sin, shape);
                    (qkv, 3 * d)
                };
                let dy = if half == 1 { self.dgate_up.view() } else { self.dqkv.view() };
                let normed = l.normed[half].view();
                cpu.matmul_backward_weight(first.dw.view_mut(), dy, normed, m, n, d, WriteMode::Overwrite);
                cpu.matmul_backward_input(
                    self.dbranch.view_mut(),
                    dy,
                    first.w.view(),
                    m,
                    n,
                    d,
                    WriteMode::Overwrite,
                );
                let (norm, x, rstd) = (&mut l.norms[half], l.inputs[half].view(), l.rstd[half].view());
                let (dx, dw) = (self.dx.view_mut(), norm.dw.view_mut());
                let dy = self.dbranch.view();
                cpu.rmsnorm_backward(dx, dw, dy, x, norm.w.view(), rstd, m, d, WriteMode::Accumulate);
            }
        }
        cpu.embedding_backward(self.head.dw.view_mut(), self.dx.view(), &self.tokens, d);
    }

    /// Updates all parameters of the model with AdamW.
    fn update_weights(&mut self) {
        let h = AdamWHyperparams {
            lr: 1e-4,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            step: 9,
            grad_scale: 1.0,
        };
        let layers = self.layers.iter_mut().flat_map(|l| l.norms.iter_mut().chain(&mut l.matrices));
        for p in layers.chain([&mut self.head]) {
            let (avg, avg_sq) = (p.avg.view_mut(), p.avg_sq.view_mut());
            self.cpu.adamw(p.w.view_mut(), None, p.dw.view(), avg, avg_sq, &h);
        }
    }
}

/// Creates a buffer of `len` random numbers in −0.5..0.5.
fn make_random_buf(len: usize) -> Buf {
    let mut b = Buf::zeroed(len);
    let mut state = 1u32;
    for x in b.host_slice_mut() {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        *x = state as f32 / u32::MAX as f32 - 0.5;
    }
    b
}

/// Runs `run` many times and returns the seconds of the fastest run.
fn measure_fastest_run(mut run: impl FnMut()) -> f64 {
    let (begin, mut best, mut runs) = (Instant::now(), f64::INFINITY, 0);
    while runs < 5 || (begin.elapsed() < Duration::from_millis(250) && runs < 1000) {
        let t = Instant::now();
        run();
        best = best.min(t.elapsed().as_secs_f64());
        runs += 1;
    }
    best
}

/// Benchmarks of the ops of the CPU backend, on matrices of `m` rows (tokens) with the widths of a
/// small Llama model.
struct OpsBench<'a> {
    cpu: &'a Cpu,
    peak: f64,
    only: &'a str,
    m: usize,
    /// The element type of the operands of matmuls, attention and the classifier.
    dtype: Dtype,
}

impl OpsBench<'_> {
    /// Creates a buffer of `len` zeros of the element type of the benchmark.
    fn zeros(&self, len: usize) -> Buf {
        Buf::zeroed_as(self.dtype, len)
    }

    /// Creates a buffer of `len` random numbers of the element type of the benchmark.
    fn random(&self, len: usize) -> Buf {
        let mut buf = self.zeros(len);
        self.cpu.cast(buf.view_mut(), make_random_buf(len).view());
        buf
    }

    /// Runs `run`, an op of the CPU backend, several times, and prints its rate in GFLOP/s. `flops`
    /// is the number of floating-point operations of one run.
    fn report_flops(&self, name: &str, flops: usize, run: impl FnMut()) {
        if name.contains(self.only) {
            let rate = flops as f64 / measure_fastest_run(run);
            println!("  {name:34} {:8.1} GFLOP/s  {:5.1} % of peak", rate / 1e9, 100.0 * rate / self.peak);
        }
    }

    /// Runs `run`, an op of the CPU backend, several times, and prints its memory bandwidth in
    /// GB/s. `elements` is the number of elements that one run reads and writes.
    fn report_bytes(&self, name: &str, elements: usize, run: impl FnMut()) {
        if name.contains(self.only) {
            let seconds = measure_fastest_run(run);
            println!(
                "  {name:34} {:8.1} GB/s     {:7.1} µs",
                4e-9 * elements as f64 / seconds,
                1e6 * seconds
            );
        }
    }

    /// Measures the rates of the matmuls of a transformer layer and of the output layer.
    fn bench_matmuls(&self) {
        let (cpu, m) = (self.cpu, self.m);
        let shapes = [
            ("qkv", 3 * HIDDEN, HIDDEN),
            ("o", HIDDEN, HIDDEN),
            ("gate_up", 2 * INTERMEDIATE, HIDDEN),
            ("down", HIDDEN, INTERMEDIATE),
            ("head", VOCABULARY, HIDDEN),
        ];
        for (name, n, k) in shapes {
            let (x, w, dy) = (self.random(m * k), self.random(n * k), self.random(m * n));
            let (mut y, mut dx, mut dw) = (self.zeros(m * n), self.zeros(m * k), Buf::zeroed(n * k));
            let flops = 2 * m * n * k;
            self.report_flops(&format!("{name} forward"), flops, || {
                cpu.matmul_forward(y.view_mut(), x.view(), w.view(), m, n, k, WriteMode::Overwrite);
            });
            self.report_flops(&format!("{name} backward input"), flops, || {
                cpu.matmul_backward_input(dx.view_mut(), dy.view(), w.view(), m, n, k, WriteMode::Overwrite);
            });
            self.report_flops(&format!("{name} backward weight"), flops, || {
                let (dy, x) = (dy.view(), x.view());
                cpu.matmul_backward_weight(dw.view_mut(), dy, x, m, n, k, WriteMode::Accumulate);
            });
        }
    }

    /// Measures the matmuls of the experts of a mixture-of-experts layer in which the router
    /// selects two of eight experts for each token. The experts' matrices are read from memory each
    /// time, because other matrices are used in between.
    fn bench_experts(&self) {
        let (cpu, rows, width) = (self.cpu, 2 * self.m, 512);
        for (name, n, k) in [("experts gate_up", 2 * width, HIDDEN), ("experts down", HIDDEN, width)] {
            let (x, w, dy) =
                (self.random(rows * k), self.random(LAYERS * EXPERTS * n * k), self.random(rows * n));
            let (mut y, mut dx) = (self.zeros(rows * n), self.zeros(rows * k));
            let mut dw = Buf::zeroed(EXPERTS * n * k);
            let group =
                |e| RowGroup { rows: e * rows / EXPERTS..(e + 1) * rows / EXPERTS, matrix_offset: e * n * k };
            let groups: Vec<RowGroup> = (0..EXPERTS).map(group).collect();
            let (flops, mut layer) = (2 * rows * n * k, 0);
            let mut next = || {
                layer = (layer + 1) % LAYERS;
                w.view().slice(layer * EXPERTS * n * k..(layer + 1) * EXPERTS * n * k)
            };
            self.report_flops(&format!("{name} forward"), flops, || {
                cpu.grouped_forward(y.view_mut(), x.view(), next(), &groups, n, k);
            });
            self.report_flops(&format!("{name} backward input"), flops, || {
                cpu.grouped_backward_input(dx.view_mut(), dy.view(), next(), &groups, n, k);
            });
            self.report_flops(&format!("{name} backward weight"), flops, || {
                cpu.grouped_backward_weight(dw.view_mut(), dy.view(), x.view(), &groups, n, k);
            });
        }
    }

    /// Measures attention with as many key heads as query heads, and grouped-query attention with
    /// fewer key heads.
    fn bench_attention(&self) {
        let (cpu, m) = (self.cpu, self.m);
        for kv_heads in [HEADS, 2] {
            let shape = AttentionShape::new(m / SEQUENCE_LEN, SEQUENCE_LEN, HEADS, kv_heads, HEAD_DIM);
            let qkv = self.random(m * (HEADS + 2 * kv_heads) * HEAD_DIM);
            let d_o = self.random(m * HIDDEN);
            let (mut o, mut lse) = (self.zeros(m * HIDDEN), Buf::zeroed(HEADS * m));
            let mut dqkv = self.zeros(qkv.len());
            let starts = vec![0; m];
            // Half of two matmuls of t × t × head_dim (causal); the backward pass has five.
            let product = shape.b * HEADS * SEQUENCE_LEN * (SEQUENCE_LEN + 1) * HEAD_DIM;
            self.report_flops(&format!("attention forward, {kv_heads} kv heads"), 2 * product, || {
                cpu.attention_forward(o.view_mut(), lse.view_mut(), qkv.view(), &starts, shape);
            });
            self.report_flops(&format!("attention backward, {kv_heads} kv heads"), 5 * product, || {
                let (o, lse) = (o.view(), lse.view());
                cpu.attention_backward(dqkv.view_mut(), d_o.view(), o, lse, qkv.view(), &starts, shape);
            });
        }
    }

    /// Measures the fused computation of the output layer's matmul and the cross-entropy loss, with
    /// and without gradients.
    fn bench_classifier(&self) {
        let (cpu, m, d, v) = (self.cpu, self.m, HIDDEN, VOCABULARY);
        let (x, w) = (self.random(m * d), self.random(v * d));
        let labels: Vec<u32> = (0..m).map(|i| (i * 31 % v) as u32).collect();
        let (mut loss, mut dx, mut dw) = (Buf::zeroed(m), self.zeros(m * d), Buf::zeroed(v * d));
        let shape = ClassifierShape { m, d, v, softcap: None };
        self.report_flops("classifier forward", 2 * m * d * v, || {
            cpu.compute_classifier_loss(loss.view_mut(), x.view(), w.view(), &labels, shape, None);
        });
        self.report_flops("classifier forward + backward", 6 * m * d * v, || {
            let (dx, dw) = (dx.view_mut(), dw.view_mut());
            let grads = ClassifierGrads { dx, dw, dw_write: WriteMode::Overwrite, scale: 1.0 };
            cpu.compute_classifier_loss(loss.view_mut(), x.view(), w.view(), &labels, shape, Some(grads));
        });
    }

    /// Measures norms, RoPE, SwiGLU, the embedding and vector ops.
    fn bench_row_ops(&self) {
        let (cpu, m, d, f) = (self.cpu, self.m, HIDDEN, INTERMEDIATE);
        let (x, w, dy) = (make_random_buf(m * d), make_random_buf(d), make_random_buf(m * d));
        let (mut y, mut rstd) = (Buf::zeroed(m * d), Buf::zeroed(m));
        self.report_bytes("rmsnorm forward", 2 * m * d, || {
            cpu.rmsnorm_forward(y.view_mut(), rstd.view_mut(), x.view(), w.view(), m, d, 1e-5);
        });
        let mut sum = Buf::zeroed(m * d);
        self.report_bytes("add + rmsnorm forward", 4 * m * d, || {
            let (y, rstd) = (y.view_mut(), rstd.view_mut());
            cpu.add_rmsnorm_forward(y, rstd, sum.view_mut(), x.view(), w.view(), m, d, 1e-5);
        });
        let (mut dx, mut dw) = (Buf::zeroed(m * d), Buf::zeroed(d));
        self.report_bytes("rmsnorm backward", 4 * m * d, || {
            let (dxv, dwv) = (dx.view_mut(), dw.view_mut());
            let (dy, x, w, rstd) = (dy.view(), x.view(), w.view(), rstd.view());
            cpu.rmsnorm_backward(dxv, dwv, dy, x, w, rstd, m, d, WriteMode::Accumulate);
        });
        let mut qkv = make_random_buf(m * 3 * d);
        let (cos, sin) =
            (make_random_buf(SEQUENCE_LEN * HEAD_DIM / 2), make_random_buf(SEQUENCE_LEN * HEAD_DIM / 2));
        self.report_bytes("rope forward, q and k", 4 * m * d, || {
            let (b, heads) = (m / SEQUENCE_LEN, 2 * HEADS);
            let shape = RopeShape { b, t: SEQUENCE_LEN, heads, head_dim: HEAD_DIM, stride: 3 * d };
            cpu.rope_forward(qkv.view_mut(), cos.view(), sin.view(), shape);
        });
        let (gate_up, mut dz) = (make_random_buf(m * 2 * f), make_random_buf(m * f));
        let (mut z, mut dgate_up) = (Buf::zeroed(m * f), Buf::zeroed(m * 2 * f));
        self.report_bytes("swiglu forward", 3 * m * f, || {
            cpu.swiglu_forward(z.view_mut(), gate_up.view(), m, f)
        });
        self.report_bytes("swiglu backward", 6 * m * f, || {
            cpu.swiglu_backward(dgate_up.view_mut(), dz.view_mut(), gate_up.view(), m, f);
        });
        let table = make_random_buf(VOCABULARY * d);
        let mut dtable = Buf::zeroed(VOCABULARY * d);
        let tokens: Vec<u32> = (0..m).map(|i| (i * 977 % VOCABULARY) as u32).collect();
        self.report_bytes("embedding forward", 2 * m * d, || {
            cpu.embedding_forward(y.view_mut(), table.view(), &tokens, d);
        });
        self.report_bytes("embedding backward", 3 * m * d, || {
            cpu.embedding_backward(dtable.view_mut(), dy.view(), &tokens, d);
        });
        self.bench_vector_ops();
    }

    /// Measures elementwise operations, sums of squares and AdamW updates on vectors of 2 Mi
    /// elements.
    fn bench_vector_ops(&self) {
        let (cpu, len) = (self.cpu, 2 << 20);
        let (mut p, g) = (make_random_buf(len), make_random_buf(len));
        let (mut m, mut v) = (Buf::zeroed(len), Buf::zeroed(len));
        self.report_bytes("add, 2 Mi elements", 3 * len, || cpu.add(m.view_mut(), g.view()));
        self.report_bytes("scale", 2 * len, || cpu.scale(m.view_mut(), 0.5));
        let mut norms = vec![0.0; len / NORM_BLOCK_LEN];
        self.report_bytes("sum_squares_by_block", len, || cpu.sum_squares_by_block(&mut norms, g.view()));
        let h = AdamWHyperparams {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            step: 9,
            grad_scale: 0.5,
        };
        m.host_slice_mut().fill(0.0);
        self.report_bytes("adamw", 7 * len, || {
            cpu.adamw(p.view_mut(), None, g.view(), m.view_mut(), v.view_mut(), &h);
        });
    }
}
