//! Attention by the emulated cuDNN, which does each operation of a graph by its definition: results beside the CPU's, and which
//! of the two kinds of kernels a shape gets.
#[path = "card/calls.rs"]
mod calls;
mod card;

use calls::calls;
use device::cuda::{Attention, Places};
use device::ops::AttentionShape;
use device::{Buf, Cuda, Dtype, Ops, Storage, parity};
use std::time::Duration;

fn places() -> Places {
    let card = card::folder();
    Places { job: vec![card.to_owned(), card.join("cudnn")], ..Places::default() }
}

fn cuda(how: Attention) -> Cuda {
    let cuda = Cuda::open(&places(), 0, None).expect("the emulated card");
    cuda.choose_attention(how, &places()).expect("the emulated cuDNN");
    cuda
}

#[test]
fn attention_is_the_cpus() {
    let before = calls("cudnnBackendExecute");
    let row = parity::by_cudnn(&cuda(Attention::Dnn), 1, 12);
    assert!(row.failed.is_none() && row.shapes == 16 && row.worst.bf16 > 1e-4, "{row:#?}");
    // forward and backward, from two places
    assert_eq!(calls("cudnnBackendExecute") - before, 16 * 4);
}

/// Everything that an op of attention has, in bf16, and the op itself.
struct Attended {
    shape: AttentionShape,
    starts: Vec<u32>,
    qkv: Buf,
    o: Buf,
    lse: Buf,
    d_o: Buf,
    dqkv: Buf,
}

impl Attended {
    fn new(cuda: &Cuda, dtype: Dtype, shape: AttentionShape) -> Self {
        let (rows, width) = (shape.b * shape.t, (shape.heads + 2 * shape.kv_heads) * shape.head_dim);
        let values = |len: usize, seed: usize| {
            let all: Vec<f32> = (0..len).map(|i| ((i * 7919 + seed) % 1000) as f32 / 500.0 - 1.0).collect();
            let wide = cuda.copied((&all[..]).into());
            let mut buf = cuda.zeroed(dtype, len);
            cuda.cast(buf.view_mut(), wide.view());
            buf
        };
        let out = rows * shape.heads * shape.head_dim;
        Attended {
            shape,
            starts: vec![0; rows],
            qkv: values(rows * width, 1),
            o: cuda.zeroed(dtype, out),
            lse: cuda.zeroed(Dtype::F32, rows * shape.heads),
            d_o: values(out, 2),
            dqkv: cuda.zeroed(dtype, rows * width),
        }
    }

    /// The output and the gradient.
    fn run(&mut self, cuda: &Cuda) -> [Vec<f32>; 2] {
        let Attended { shape, starts, qkv, o, lse, d_o, dqkv } = self;
        cuda.attention_forward(o.view_mut(), lse.view_mut(), qkv.view(), starts, *shape);
        cuda.attention_backward(
            dqkv.view_mut(),
            d_o.view(),
            o.view(),
            lse.view(),
            qkv.view(),
            starts,
            *shape,
        );
        [&*o, &*dqkv].map(|buf| {
            let mut wide = cuda.zeroed(Dtype::F32, buf.len());
            cuda.cast(wide.view_mut(), buf.view());
            cuda.downloaded(wide.view()).host().to_vec()
        })
    }
}

const SHAPE: AttentionShape = AttentionShape {
    b: 2,
    t: 24,
    heads: 4,
    kv_heads: 2,
    head_dim: 16,
    scale: 0.25,
    softcap: None,
    dropout: None,
};

fn said(cuda: &Cuda) -> Vec<String> {
    std::iter::from_fn(|| cuda.step_took(Duration::from_millis(1))).map(|said| format!("{said:?}")).collect()
}

#[test]
fn the_clock_chooses() {
    let fastest = cuda(Attention::Fastest);
    let mut small = Attended::new(&fastest, Dtype::Bf16, SHAPE);
    let first = small.run(&fastest);
    let told = said(&fastest);
    assert_eq!(told.len(), 2, "one for each direction: {told:?}");
    for (said, direction) in told.iter().zip(["forward", "backward"]) {
        assert!(said.contains("attention of 2 × 24 tokens, 4 and 2 heads of 16"), "{said}");
        assert!(
            said.contains(direction) && said.contains("µs by cuDNN") && said.contains("µs by launch"),
            "{said}"
        );
    }
    // Chosen once.
    let before = calls("cudnnBackendExecute");
    assert_eq!(small.run(&fastest), first);
    let by_cudnn = told.iter().filter(|said| said.contains("by cuDNN 9.19.0 (")).count() as i64;
    assert_eq!(calls("cudnnBackendExecute") - before, by_cudnn);
    assert_eq!(said(&fastest), [] as [&str; 0]);
}

#[test]
fn what_no_graph_says_goes_without() {
    let fastest = cuda(Attention::Fastest);
    let before = calls("cudnnBackendExecute");
    let mut documents = Attended::new(&fastest, Dtype::Bf16, SHAPE);
    documents.starts[10..24].fill(10);
    let capped = Attended::new(&fastest, Dtype::Bf16, AttentionShape { softcap: Some(2.0), ..SHAPE });
    let wide = Attended::new(&fastest, Dtype::F32, SHAPE);
    let odd = Attended::new(&fastest, Dtype::Bf16, AttentionShape { head_dim: 12, ..SHAPE });
    let short = Attended::new(&fastest, Dtype::Bf16, AttentionShape { t: 1, ..SHAPE });
    let mut all = [documents, capped, wide, odd, short];
    let given = all.each_mut().map(|one| one.run(&fastest));
    assert_eq!(calls("cudnnBackendExecute"), before);
    let own = Cuda::open(&places(), 0, None).expect("the emulated card");
    for (one, given) in all.iter().zip(given) {
        let dtype = one.qkv.dtype();
        let mut again = Attended { starts: one.starts.clone(), ..Attended::new(&own, dtype, one.shape) };
        assert_eq!(again.run(&own), given, "{:?}", one.shape);
    }
}

/// Asked for alone, it is had or refused.
#[test]
fn cudnn_alone_is_had_or_refused() {
    let alone = cuda(Attention::Dnn);
    let refused = |shape: AttentionShape, dtype, starts: Option<usize>| {
        let mut one = Attended::new(&alone, dtype, shape);
        if let Some(at) = starts {
            one.starts[at..].fill(at as u32);
        }
        let run = std::panic::AssertUnwindSafe(|| one.run(&alone));
        let panic = std::panic::catch_unwind(run).expect_err("refused");
        device::storage::said(panic.as_ref())
    };
    for said in [
        refused(SHAPE, Dtype::F32, None),
        refused(AttentionShape { softcap: Some(2.0), ..SHAPE }, Dtype::Bf16, None),
        refused(AttentionShape { b: 1, ..SHAPE }, Dtype::Bf16, Some(9)),
        refused(AttentionShape { head_dim: 136, ..SHAPE }, Dtype::Bf16, None),
    ] {
        assert!(
            said.contains("cuDNN 9.19.0 has no plan for") && said.contains("train.attention: auto"),
            "{said}"
        );
    }
    let without = Places { job: vec![card::folder().to_owned()], ..Places::default() };
    let card = Cuda::open(&without, 0, None).expect("the emulated card");
    let error = card.choose_attention(Attention::Dnn, &without).expect_err("no cuDNN").to_string();
    assert!(error.contains("cuDNN, NVIDIA's attention (libcudnn.so.9) was not found"), "{error}");
    // Where it is only the faster of two it isn't missed.
    card.choose_attention(Attention::Fastest, &without).expect("own kernels");
    Attended::new(&card, Dtype::Bf16, SHAPE).run(&card);
}

/// With graphs on what cuDNN does is part of them.
#[test]
fn cuda_graphs_have_it() {
    let plain = cuda(Attention::Dnn);
    let expected = Attended::new(&plain, Dtype::Bf16, SHAPE).run(&plain);
    let graphs = cuda(Attention::Dnn);
    let mut one = Attended::new(&graphs, Dtype::Bf16, SHAPE);
    graphs.use_graphs(true);
    for _ in 0..5 {
        assert_eq!(one.run(&graphs), expected);
    }
    let replayed = graphs.replayed();
    assert!(replayed.launches > 0, "{replayed:?}");
}
