//! Tests attention by the emulated cuDNN, which executes each operation of a graph by its
//! definition. Results are compared with those of the CPU. Other tests check the choice between
//! cuDNN and launch's own kernels.

use crate::call_counts::call_count;
use crate::emulated_gpu;
use crate::own_process::is_own_process;
use device::cuda::{AttentionBackend, CudaError, LibrarySearchPaths};
use device::ops::{AttentionOps, AttentionShape, VectorOps};
use device::storage::BackendNotice;
use device::{Buf, Cuda, Dtype, Storage, conformance};
use diagnostic::{Diagnostic, codes::device::CUDNN_ATTENTION_UNSUPPORTED};
use std::time::Duration;

/// Returns a search path for the CUDA libraries that contains only the emulated ones, including the
/// emulated cuDNN.
fn library_paths() -> LibrarySearchPaths {
    let directory = emulated_gpu::library_directory();
    LibrarySearchPaths {
        configured: vec![directory.to_owned(), directory.join("cudnn")],
        ..LibrarySearchPaths::default()
    }
}

/// Opens the emulated GPU such that `backend` selects the kernels of attention.
fn open_gpu_with(backend: AttentionBackend) -> Cuda {
    let cuda = Cuda::open(&library_paths(), 0, None).expect("the emulated GPU");
    cuda.set_attention_backend(backend, &library_paths()).expect("the emulated cuDNN");
    cuda
}

#[test]
fn cudnn_attention_matches_the_cpu() {
    if !is_own_process("cudnn::cudnn_attention_matches_the_cpu") {
        return;
    }
    let before = call_count("cudnnBackendExecute");
    let row = conformance::compare_cudnn_attention_with_cpu(&open_gpu_with(AttentionBackend::Cudnn), 1, 12);
    assert!(row.failure.is_none() && row.cases == 16 && row.max_errors.bf16 > 1e-4, "{row:#?}");
    // forward and backward, at two addresses each
    assert_eq!(call_count("cudnnBackendExecute") - before, 16 * 4);
}

/// The shape, inputs and outputs of one test case of attention.
struct AttentionCase {
    shape: AttentionShape,
    starts: Vec<u32>,
    qkv: Buf,
    o: Buf,
    lse: Buf,
    d_o: Buf,
    dqkv: Buf,
}

impl AttentionCase {
    fn new(cuda: &Cuda, dtype: Dtype, shape: AttentionShape) -> Self {
        let (rows, width) = (shape.b * shape.t, (shape.heads + 2 * shape.kv_heads) * shape.head_dim);
        let values = |len: usize, seed: usize| {
            let values: Vec<f32> =
                (0..len).map(|i| ((i * 7919 + seed) % 1000) as f32 / 500.0 - 1.0).collect();
            let wide = cuda.clone_to_device((&values[..]).into());
            let mut buf = cuda.zeroed(dtype, len);
            cuda.cast(buf.view_mut(), wide.view());
            buf
        };
        let out = rows * shape.heads * shape.head_dim;
        AttentionCase {
            shape,
            starts: vec![0; rows],
            qkv: values(rows * width, 1),
            o: cuda.zeroed(dtype, out),
            lse: cuda.zeroed(Dtype::F32, rows * shape.heads),
            d_o: values(out, 2),
            dqkv: cuda.zeroed(dtype, rows * width),
        }
    }

    /// Runs the forward and the backward pass of attention on the GPU. Returns the output and the
    /// gradient of qkv.
    fn run(&mut self, cuda: &Cuda) -> [Vec<f32>; 2] {
        let AttentionCase { shape, starts, qkv, o, lse, d_o, dqkv } = self;
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
            cuda.clone_to_host(wide.view()).host_slice().to_vec()
        })
    }
}

/// An attention shape that cuDNN supports.
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

/// Removes and returns every pending notice of the backend.
fn take_notices(cuda: &Cuda) -> Vec<BackendNotice> {
    std::iter::from_fn(|| cuda.record_step_duration(Duration::from_millis(1))).collect()
}

#[test]
fn auto_uses_the_faster_backend() {
    if !is_own_process("cudnn::auto_uses_the_faster_backend") {
        return;
    }
    let auto = open_gpu_with(AttentionBackend::Auto);
    let mut small = AttentionCase::new(&auto, Dtype::Bf16, SHAPE);
    let first = small.run(&auto);
    let notices_of_first = take_notices(&auto);
    let mut expected_calls = 0;
    let [forward, backward] = &notices_of_first[..] else {
        panic!("one notice per direction: {notices_of_first:?}")
    };
    for (notice, direction) in [(forward, "forward"), (backward, "backward")] {
        let BackendNotice::AttentionMeasured { attention, cudnn_version, cudnn_seconds, built_in_seconds } =
            notice
        else {
            panic!("{notice:?}")
        };
        let expected = format!("attention of 2 × 24 tokens, 4 and 2 heads of 16, {direction}");
        assert_eq!((attention.as_str(), cudnn_version.as_str()), (expected.as_str(), "9.19.0"));
        expected_calls += i64::from(cudnn_seconds < built_in_seconds);
    }
    // The second run uses the decision.
    let before = call_count("cudnnBackendExecute");
    assert_eq!(small.run(&auto), first);
    assert_eq!(call_count("cudnnBackendExecute") - before, expected_calls);
    assert_eq!(take_notices(&auto), []);
}

#[test]
fn auto_uses_built_in_kernels_for_shapes_that_cudnn_rejects() {
    if !is_own_process("cudnn::auto_uses_built_in_kernels_for_shapes_that_cudnn_rejects") {
        return;
    }
    let auto = open_gpu_with(AttentionBackend::Auto);
    let before = call_count("cudnnBackendExecute");
    let mut documents = AttentionCase::new(&auto, Dtype::Bf16, SHAPE);
    documents.starts[10..24].fill(10);
    let capped = AttentionCase::new(&auto, Dtype::Bf16, AttentionShape { softcap: Some(2.0), ..SHAPE });
    let wide = AttentionCase::new(&auto, Dtype::F32, SHAPE);
    let odd = AttentionCase::new(&auto, Dtype::Bf16, AttentionShape { head_dim: 12, ..SHAPE });
    let short = AttentionCase::new(&auto, Dtype::Bf16, AttentionShape { t: 1, ..SHAPE });
    let mut unsupported = [documents, capped, wide, odd, short];
    let results = unsupported.each_mut().map(|one| one.run(&auto));
    assert_eq!(call_count("cudnnBackendExecute"), before);
    let built_in = Cuda::open(&library_paths(), 0, None).expect("the emulated GPU");
    for (one, result) in unsupported.iter().zip(results) {
        let dtype = one.qkv.dtype();
        let again = AttentionCase::new(&built_in, dtype, one.shape);
        let mut again = AttentionCase { starts: one.starts.clone(), ..again };
        assert_eq!(again.run(&built_in), result, "{:?}", one.shape);
    }
}

#[test]
fn the_cudnn_backend_rejects_what_cudnn_cannot_compute() {
    let cudnn = open_gpu_with(AttentionBackend::Cudnn);
    let rejection = |shape: AttentionShape, dtype, starts: Option<usize>| {
        let mut one = AttentionCase::new(&cudnn, dtype, shape);
        if let Some(at) = starts {
            one.starts[at..].fill(at as u32);
        }
        one.run(&cudnn);
        Diagnostic::from(cudnn.take_failure().expect_err("rejected"))
    };
    let rejections = [
        rejection(SHAPE, Dtype::F32, None),
        rejection(AttentionShape { softcap: Some(2.0), ..SHAPE }, Dtype::Bf16, None),
        rejection(AttentionShape { b: 1, ..SHAPE }, Dtype::Bf16, Some(9)),
        rejection(AttentionShape { head_dim: 136, ..SHAPE }, Dtype::Bf16, None),
    ];
    for rejection in &rejections {
        assert_eq!(rejection.code(), CUDNN_ATTENTION_UNSUPPORTED);
    }
    let messages: Vec<String> = rejections.iter().map(|r| diagnostic::render(r, false)).collect();
    insta::assert_snapshot!(messages.concat());
    let without_cudnn = LibrarySearchPaths {
        configured: vec![emulated_gpu::library_directory().to_owned()],
        ..LibrarySearchPaths::default()
    };
    let cuda = Cuda::open(&without_cudnn, 0, None).expect("the emulated GPU");
    let error = cuda.set_attention_backend(AttentionBackend::Cudnn, &without_cudnn).expect_err("no cuDNN");
    assert!(
        matches!(&error, CudaError::LibraryNotFound { file_names, .. } if file_names == "libcudnn.so.9"),
        "{error:?}"
    );
    // With the backend auto, cuDNN is optional.
    let reason =
        cuda.set_attention_backend(AttentionBackend::Auto, &without_cudnn).expect("built-in kernels");
    assert_eq!(reason, None);
    AttentionCase::new(&cuda, Dtype::Bf16, SHAPE).run(&cuda);
}

#[test]
fn cuda_graphs_contain_cudnn_plans() {
    let direct = open_gpu_with(AttentionBackend::Cudnn);
    let expected = AttentionCase::new(&direct, Dtype::Bf16, SHAPE).run(&direct);
    let with_graphs = open_gpu_with(AttentionBackend::Cudnn);
    let mut one = AttentionCase::new(&with_graphs, Dtype::Bf16, SHAPE);
    with_graphs.set_graphs_enabled(true);
    for _ in 0..5 {
        assert_eq!(one.run(&with_graphs), expected);
    }
    let stats = with_graphs.graph_stats();
    assert!(stats.launches > 0, "{stats:?}");
}
