//! Tests the CUDA backend with the PTX that NVIDIA's compiler generates for the kernels. The
//! emulated GPU interprets the PTX instruction by instruction. The interpreter detects what
//! compute-sanitizer would.

use crate::{emulated_gpu, own_process::run_test_alone};
use device::cuda::LibrarySearchPaths;
use device::ops::{ActivationOps, LayerNormOps, LayerNormParams, RmsNormOps, VectorOps, WriteMode};
use device::{Buf, Cuda, Dtype, Storage, View, ViewMut, conformance};
use std::ffi::{CString, c_char, c_int, c_uint, c_void};

#[test]
fn every_compiled_op_matches_the_cpu() {
    let Some(directory) = emulated_gpu::ptx_library_directory() else { return };
    let paths = LibrarySearchPaths { configured: vec![directory], ..LibrarySearchPaths::default() };
    let cuda = Cuda::open(&paths, 0, None).expect("the emulated GPU");
    let rows = conformance::compare_ops_with_cpu(&cuda, 1, 2);
    assert_eq!(rows.len(), 12);
    assert!(rows.iter().all(|row| row.failure.is_none() && row.cases >= 2), "{rows:#?}");
}

/// The PTX text with which every test kernel begins. The kernel has 64 threads and 64 words of
/// shared memory.
///
/// - `%r0`: index of the thread.
/// - `%r1`: address of the thread's word in shared memory.
/// - `%r2`: address of the word of the thread's neighbour in the warp.
/// - `%r3`: address of the word of the corresponding thread in the other warp.
/// - `%rd0`: address of 64 words of global memory; `%rd1`: address of the thread's word there.
/// - `%p0`: true in the lower half of a warp; `%p1`: true in the first warp.
const KERNEL_PROLOGUE: &str = "
.version 9.0
.target sm_90
.address_size 64
.visible .entry f(
    .param .u64 f_param_0
)
{
    .reg .pred %p<3>;
    .reg .b32 %r<16>;
    .reg .b64 %rd<4>;
    .shared .align 16 .b8 words[256];
    .shared .align 8 .b8 barrier[8];
    .shared .align 1024 .b8 tile[8192];
    mov.u32 %r0, %tid.x;
    shl.b32 %r4, %r0, 2;
    mov.u32 %r5, words;
    add.s32 %r1, %r5, %r4;
    xor.b32 %r6, %r4, 4;
    add.s32 %r2, %r5, %r6;
    xor.b32 %r7, %r4, 128;
    add.s32 %r3, %r5, %r7;
    and.b32 %r8, %r0, 16;
    setp.eq.s32 %p0, %r8, 0;
    setp.lt.u32 %p1, %r0, 32;
    ld.param.u64 %rd0, [f_param_0];
    cvt.u64.u32 %rd1, %r4;
    add.s64 %rd1, %rd0, %rd1;
";

/// Initializes the mbarrier for which 32 threads arrive.
macro_rules! memory_barrier {
    () => {
        "setp.eq.u32 %p2, %r0, 0; @%p2 mbarrier.init.shared::cta.b64 [barrier], 32; bar.sync 0; "
    };
}
/// Waits for the first phase of the mbarrier.
macro_rules! await_phase {
    () => {
        "$W: mbarrier.try_wait.parity.shared::cta.b64 %p2, [barrier], 0; @!%p2 bra $W; "
    };
}
/// Writes zeros to a tile of 64 rows and 64 columns in shared memory, 16 words at a time.
macro_rules! write_tile {
    () => {
        "shl.b32 %r9, %r0, 7; mov.u32 %r10, tile; add.s32 %r9, %r9, %r10; mov.u32 %r11, 32; mov.u32 %r12, 0; $T: st.shared.u32 [%r9], %r12; add.s32 %r9, %r9, 4; add.s32 %r11, %r11, -1; setp.ne.s32 %p2, %r11, 0; @%p2 bra $T; "
    };
}
/// A matmul of four registers, and the tile as the transposed right operand. Each thread's 32 sums
/// are `%f0` and following.
macro_rules! product {
    () => {
        "mov.u32 %r10, tile; shr.u32 %r10, %r10, 4; cvt.u64.u32 %rd2, %r10; or.b64 %rd2, %rd2, 4611686293305294848; setp.eq.u32 %p2, 1, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3, %f4, %f5, %f6, %f7, %f8, %f9, %f10, %f11, %f12, %f13, %f14, %f15, %f16, %f17, %f18, %f19, %f20, %f21, %f22, %f23, %f24, %f25, %f26, %f27, %f28, %f29, %f30, %f31}, {%a0, %a1, %a2, %a3}, %rd2, %p2, 1, 1, 0; "
    };
}

/// Test kernels: the text after [`KERNEL_PROLOGUE`], and the error that the emulator reports. The
/// error is `None` for a correct kernel.
const TEST_KERNELS: [(&str, Option<&str>); 31] = [
    ("st.shared.u32 [%r1], %r0; bar.sync 0; ld.shared.u32 %r9, [%r3]; st.global.u32 [%rd1], %r9;", None),
    ("st.shared.u32 [%r1], %r0; bar.warp.sync -1; ld.shared.u32 %r9, [%r2];", None),
    ("st.shared.u32 [%r1], %r0; ld.shared.u32 %r9, [%r1]; st.shared.u32 [%r1], %r9;", None),
    ("@%p0 bra $L1; mov.u32 %r9, 1; $L1: shfl.sync.bfly.b32 %r9|%p2, %r0, 1, 31, -1;", None),
    (
        "cp.async.ca.shared.global [%r1], [%rd1], 4, 4; cp.async.commit_group; cp.async.wait_group 0; ld.shared.u32 %r9, [%r1];",
        None,
    ),
    ("st.shared.u32 [%r1], %r0; ld.shared.u32 %r9, [%r3];", Some("a race in shared memory")),
    (
        "st.shared.u32 [%r1], %r0; bar.warp.sync -1; ld.shared.u32 %r9, [%r3];",
        Some("a race in shared memory"),
    ),
    ("st.shared.u32 [%r1], %r0; ld.shared.u32 %r9, [%r2];", Some("reads what was written by thread")),
    ("ld.shared.u32 %r9, [%r3]; st.shared.u32 [%r1], %r0;", Some("a race in shared memory")),
    ("ld.shared.u32 %r9, [%r2]; st.shared.u32 [%r1], %r0;", Some("writes what was read by thread")),
    ("st.shared.u32 [words], %r0;", Some("writes what was written by thread")),
    (
        "cp.async.ca.shared.global [%r1], [%rd1], 4, 4; cp.async.commit_group; cp.async.wait_group 1; ld.shared.u32 %r9, [%r1];",
        Some("reads the target of a copy in progress"),
    ),
    (
        "cp.async.ca.shared.global [%r1], [%rd1], 4, 4; cp.async.commit_group;",
        Some("ended before its asynchronous copies completed"),
    ),
    ("st.shared.u32 [%r1+4], %r0;", Some("beyond its array in shared memory")),
    ("ld.global.u32 %r9, [%rd1+4];", Some("outside of GPU memory")),
    ("ld.global.v2.u32 {%r9, %r10}, [%rd1];", Some("an address is misaligned")),
    (
        "@%p0 bra $L1; ret; $L1: shfl.sync.bfly.b32 %r9|%p2, %r0, 1, 31, -1;",
        Some("a collective instruction includes lanes that ended"),
    ),
    (
        "@%p0 bra $L1; bar.sync 0; ret; $L1: shfl.sync.bfly.b32 %r9|%p2, %r0, 1, 31, -1;",
        Some("lanes wait for lanes of their warp that never arrive"),
    ),
    ("@%p0 bra $L1; bar.sync 0; ret; $L1: bar.sync 0;", Some("lanes of a warp wait at different barriers")),
    ("st.shared.u32 [%r1], %r0; bar.sync 1, 64; ld.shared.u32 %r9, [%r3];", None),
    (
        "@%p1 bra $L1; st.shared.u32 [%r1], %r0; bar.arrive 2, 64; ret; $L1: bar.sync 2, 64; ld.shared.u32 %r9, [%r3];",
        None,
    ),
    (
        "@%p1 bra $L1; bar.arrive 2, 64; st.shared.u32 [%r1], %r0; ret; $L1: bar.sync 2, 64; ld.shared.u32 %r9, [%r3];",
        Some("a race in shared memory"),
    ),
    ("bar.sync 1, 96;", Some("warps wait for barriers that never open")),
    (
        concat!(
            memory_barrier!(),
            "@%p1 bra $L1; st.shared.u32 [%r1], %r0; mbarrier.arrive.shared::cta.b64 %rd2, [barrier]; ret; $L1: ",
            await_phase!(),
            "ld.shared.u32 %r9, [%r3];"
        ),
        None,
    ),
    (
        concat!(
            memory_barrier!(),
            "@%p1 bra $L1; mbarrier.arrive.shared::cta.b64 %rd2, [barrier]; st.shared.u32 [%r1], %r0; ret; $L1: ",
            await_phase!(),
            "ld.shared.u32 %r9, [%r3];"
        ),
        Some("a race in shared memory"),
    ),
    (concat!(memory_barrier!(), await_phase!()), Some("warps wait for barriers that never open")),
    (
        concat!(
            "wgmma.fence.sync.aligned; ",
            product!(),
            "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
        ),
        Some("what was never written"),
    ),
    (
        concat!(
            write_tile!(),
            "bar.sync 0; wgmma.fence.sync.aligned; ",
            product!(),
            "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
        ),
        Some("without a proxy fence"),
    ),
    (
        concat!(
            write_tile!(),
            "fence.proxy.async.shared::cta; bar.sync 0; wgmma.fence.sync.aligned; ",
            product!(),
            "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; mov.b32 %r9, %f0;"
        ),
        None,
    ),
    (
        concat!(
            write_tile!(),
            "fence.proxy.async.shared::cta; bar.sync 0; ",
            product!(),
            "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
        ),
        Some("without a wgmma fence"),
    ),
    (
        concat!(
            write_tile!(),
            "fence.proxy.async.shared::cta; bar.sync 0; wgmma.fence.sync.aligned; ",
            product!(),
            "wgmma.commit_group.sync.aligned; mov.b32 %r9, %f0;"
        ),
        Some("a register of a product in progress"),
    ),
];

#[test]
fn races_and_invalid_accesses_are_always_detected() {
    for (i, (kernel, expected)) in TEST_KERNELS.iter().enumerate() {
        let test = "ptx::the_kernel_that_the_parent_process_selects_runs";
        let output = run_test_alone(test, "PTX_TEST_KERNEL", i.to_string());
        let stderr = String::from_utf8_lossy(&output.stderr);
        match expected {
            None => assert!(output.status.success(), "{kernel}: {stderr}"),
            Some(expected) => {
                assert!(!output.status.success() && stderr.contains(expected), "{kernel}: {stderr}")
            }
        }
    }
}

/// Runs one test kernel in a child process of `races_and_invalid_accesses_are_always_detected`,
/// because a detected error ends the process.
#[test]
fn the_kernel_that_the_parent_process_selects_runs() {
    let Ok(index) = std::env::var("PTX_TEST_KERNEL") else { return };
    let (body, _) = TEST_KERNELS[index.parse::<usize>().expect("a number")];
    let image = CString::new(format!("{KERNEL_PROLOGUE}{body}\nret;\n}}\n")).expect("a text");
    assert_eq!(launch_kernel(&image), 0);
}

/// An opaque pointer, by which functions of the CUDA driver identify contexts, modules and kernels.
type Handle = *mut c_void;

/// Launches the kernel `f` of this image and returns the driver's status.
fn launch_kernel(image: &CString) -> c_int {
    // SAFETY: the emulated driver declares its functions like NVIDIA's. The one argument is an
    // address.
    unsafe {
        let driver = libloading::Library::new(emulated_gpu::library_directory().join("libcuda.so.1"))
            .expect("the emulated driver");
        let symbol = |name: &str| {
            driver.get::<Handle>(name.as_bytes()).expect("a function").try_as_raw_ptr().expect("an address")
        };
        let retain_context: extern "C" fn(*mut Handle, c_int) -> c_int =
            std::mem::transmute(symbol("cuDevicePrimaryCtxRetain"));
        let set_context: extern "C" fn(Handle) -> c_int = std::mem::transmute(symbol("cuCtxSetCurrent"));
        let create_stream: extern "C" fn(*mut Handle, c_uint, c_int) -> c_int =
            std::mem::transmute(symbol("cuStreamCreateWithPriority"));
        let allocate: extern "C" fn(*mut u64, usize, Handle) -> c_int =
            std::mem::transmute(symbol("cuMemAllocAsync"));
        let load: extern "C" fn(*mut Handle, *const c_char) -> c_int =
            std::mem::transmute(symbol("cuModuleLoadData"));
        let find: extern "C" fn(*mut Handle, Handle, *const c_char) -> c_int =
            std::mem::transmute(symbol("cuModuleGetFunction"));
        type Launch = extern "C" fn(
            Handle,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            Handle,
            *mut Handle,
            *mut Handle,
        ) -> c_int;
        let launch: Launch = std::mem::transmute(symbol("cuLaunchKernel"));
        let (mut stream, mut module, mut function, mut words) =
            (std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut(), 0u64);
        let mut context = std::ptr::null_mut();
        assert_eq!((retain_context(&mut context, 0), set_context(context)), (0, 0));
        assert_eq!(create_stream(&mut stream, 0, 0), 0);
        assert_eq!(allocate(&mut words, 256, stream), 0);
        assert_eq!(load(&mut module, image.as_ptr()), 0);
        assert_eq!(find(&mut function, module, c"f".as_ptr()), 0);
        let mut arguments = [std::ptr::from_mut(&mut words).cast::<c_void>()];
        launch(function, 1, 1, 1, 64, 1, 1, 0, stream, arguments.as_mut_ptr(), std::ptr::null_mut())
    }
}

/// Checks that results do not depend on the alignment of an op's memory, which decides which kernel
/// the op uses.
#[test]
fn results_do_not_depend_on_alignment() {
    let Some(directory) = emulated_gpu::ptx_library_directory() else { return };
    let paths = LibrarySearchPaths { configured: vec![directory], ..LibrarySearchPaths::default() };
    let cuda = Cuda::open(&paths, 0, None).expect("the emulated GPU");
    for (m, d) in [(3, 64), (2, 1032), (1, 4104)] {
        let aligned = run_layer_ops(&cuda, m, d, 0);
        let shifted = run_layer_ops(&cuda, m, d, 1);
        for (i, (aligned, shifted)) in aligned.iter().zip(&shifted).enumerate() {
            let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert!(aligned.iter().all(|x| x.is_finite()) && aligned.iter().any(|x| *x != 0.0), "{i}");
            assert_eq!(bits(aligned), bits(shifted), "buffer {i} of {m} × {d}");
        }
    }
}

/// Runs the ops of a transformer layer on the GPU, and returns the contents of every buffer. Views
/// begin `shift` elements into the buffers.
fn run_layer_ops(cuda: &Cuda, m: usize, d: usize, shift: usize) -> Vec<Vec<f32>> {
    let mut buffers = create_layer_buffers(cuda, m, d, shift);
    let [mut rstd, mut stats, mut dw, mut db] = [m, 2 * m, d, d].map(|len| cuda.zeroed(Dtype::F32, len));
    let mut views: Vec<ViewMut> = buffers
        .iter_mut()
        .map(|buf| {
            let len = buf.len();
            buf.view_mut().slice(shift..len)
        })
        .collect();
    let [y, x, delta, w, b, dy, dx, gate_up, h, dgate_up, z, dz] = &mut views[..] else {
        unreachable!("buffers")
    };
    cuda.add_rmsnorm_forward(
        y.reborrow(),
        rstd.view_mut(),
        x.reborrow(),
        delta.as_view(),
        w.as_view(),
        m,
        d,
        1e-5,
    );
    cuda.rmsnorm_backward(
        dx.reborrow(),
        dw.view_mut(),
        dy.as_view(),
        x.as_view(),
        w.as_view(),
        rstd.view(),
        m,
        d,
        WriteMode::Accumulate,
    );
    let norm = LayerNormParams { w: w.as_view(), b: b.as_view(), eps: 1e-5 };
    cuda.add_layernorm_forward(z.reborrow(), stats.view_mut(), x.reborrow(), delta.as_view(), norm, m);
    let grads = (dw.view_mut(), db.view_mut());
    cuda.layernorm_backward(
        dx.reborrow(),
        grads.0,
        grads.1,
        dy.as_view(),
        x.as_view(),
        w.as_view(),
        stats.view(),
        m,
        WriteMode::Accumulate,
    );
    cuda.swiglu_forward(h.reborrow(), gate_up.as_view(), m, d);
    cuda.swiglu_backward(dgate_up.reborrow(), dy.reborrow(), gate_up.as_view(), m, d);
    cuda.gelu_forward(delta.reborrow(), y.as_view());
    cuda.gelu_backward(dz.reborrow(), h.reborrow(), y.as_view());
    drop(views);
    let shifted = buffers.iter().map(|buf| buf.view().slice(shift..buf.len()));
    shifted.chain([dw.view(), db.view()]).map(|view| copy_to_host_as_f32(cuda, view)).collect()
}

/// Creates on the GPU the buffers that the ops of a transformer layer use. The elements after the
/// first `shift` are pseudo-random numbers, which do not depend on `shift`.
fn create_layer_buffers(cuda: &Cuda, m: usize, d: usize, shift: usize) -> Vec<Buf> {
    let mut random = 0u32;
    let lens = [m * d, m * d, m * d, d, d, m * d, m * d, 2 * m * d, m * d, 2 * m * d, m * d, m * d];
    let create_buffer = |(i, len)| {
        let values: Vec<f32> = (0..len)
            .map(|_| {
                random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (random >> 8) as f32 / 4e6 - 2.0
            })
            .collect();
        random = i as u32;
        let wide = cuda.clone_to_device((&values[..]).into());
        let mut buf = cuda.zeroed(if i == 6 { Dtype::F32 } else { Dtype::Bf16 }, shift + len);
        cuda.cast(buf.view_mut().slice(shift..shift + len), wide.view());
        buf
    };
    lens.into_iter().enumerate().map(create_buffer).collect()
}

/// Copies a view in GPU memory to the host as `f32`.
fn copy_to_host_as_f32(cuda: &Cuda, view: View) -> Vec<f32> {
    let mut wide = cuda.zeroed(Dtype::F32, view.len());
    cuda.cast(wide.view_mut(), view);
    cuda.clone_to_host(wide.view()).host_slice().to_vec()
}
