//! Tests of the emulator of AMX: it decodes every form of address that an assembler can generate,
//! and rejects what a CPU rejects.
#![cfg(target_arch = "x86_64")]

use crate::emulated_amx;
use crate::own_process::run_test_alone;
use std::arch::asm;
use std::os::unix::process::ExitStatusExt;

/// The configuration of the tiles, the memory operand of LDTILECFG.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Returns a configuration of eight tiles with `rows` rows of `row_bytes` bytes.
fn configure_all(rows: u8, row_bytes: u16) -> Configuration {
    let mut configuration =
        Configuration { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    configuration.row_bytes[..8].fill(row_bytes);
    configuration.rows[..8].fill(rows);
    configuration
}

/// Executes LDTILECFG.
fn load_configuration(configuration: &Configuration) {
    // SAFETY: the emulator executes the instruction, and the compiler uses no tiles.
    unsafe { asm!("ldtilecfg [{}]", in(reg) configuration, options(nostack)) };
}

/// Loads the emulator. Returns false if this CPU lacks the instructions for which it is compiled.
fn load_emulator() -> bool {
    let can_emulate = std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("fma");
    if can_emulate {
        emulated_amx::load();
    }
    can_emulate
}

/// Executes an instruction that loads tile `tmm1`, and returns the tile's four rows of 16 bytes.
macro_rules! load_tile {
    ($load:literal, $($operands:tt)*) => {{
        let mut tile = [0u32; 16];
        // SAFETY: the caller passes the address of readable rows, and the tile has 64 bytes.
        unsafe {
            asm!(
                $load,
                "tilestored [{to} + {width}], tmm1",
                to = in(reg) tile.as_mut_ptr(),
                width = in(reg) 16usize,
                $($operands)*
                options(nostack),
            );
        }
        tile
    }};
}

#[test]
fn addresses_of_all_forms_are_decoded() {
    if !load_emulator() {
        return;
    }
    load_configuration(&configure_all(4, 16));
    let memory: Vec<u32> = (0..1024).collect();
    let expect = |first: u32, stride: u32| -> [u32; 16] {
        std::array::from_fn(|i| first + i as u32 / 4 * stride + i as u32 % 4)
    };
    let from = memory.as_ptr();
    let stride = 64usize;
    assert_eq!(
        load_tile!("tileloadd tmm1, [{f} + {s}]", f = in(reg) from, s = in(reg) stride,),
        expect(0, 16)
    );
    assert_eq!(
        load_tile!("tileloaddt1 tmm1, [{f} + {s}*2 + 64]", f = in(reg) from, s = in(reg) stride,),
        expect(16, 32)
    );
    assert_eq!(
        load_tile!("tileloadd tmm1, [{f} + {s}*8 - 100]", f = in(reg) from.wrapping_add(50), s = in(reg) stride,),
        expect(25, 128)
    );
    let before = from.wrapping_byte_sub(1000);
    assert_eq!(
        load_tile!("tileloadd tmm1, [{f} + {s}*4 + 1200]", f = in(reg) before, s = in(reg) stride,),
        expect(50, 64)
    );
    // Without an index, the distance between rows is 0.
    assert_eq!(load_tile!("tileloadd tmm1, [{f} + 8]", f = in(reg) from,), expect(2, 0));
    // The encodings of r12 and r13 as base, and of r12 as index, are special.
    assert_eq!(load_tile!("tileloadd tmm1, [r12 + r9]", in("r12") from, in("r9") stride,), expect(0, 16));
    assert_eq!(load_tile!("tileloadd tmm1, [r13 + r12*2]", in("r13") from, in("r12") stride,), expect(0, 32));
    // The stride may be negative.
    assert_eq!(
        load_tile!("tileloadd tmm1, [{f} + {s}]", f = in(reg) from.wrapping_add(48), s = in(reg) -64isize,)
            [4..8],
        [32, 33, 34, 35]
    );
}

#[test]
fn the_configuration_is_stored_and_released() {
    if !load_emulator() {
        return;
    }
    let configuration = configure_all(5, 12);
    let store = |index: usize| {
        let mut stored = [configure_all(1, 1); 2];
        // SAFETY: the destination has 64 bytes.
        unsafe {
            asm!("sttilecfg [{} + {}*2]", in(reg) stored.as_mut_ptr(), in(reg) index, options(nostack))
        };
        stored
    };
    load_configuration(&configuration);
    assert_eq!(store(0)[0], configuration);
    assert_eq!(store(32)[1], configuration);
    // SAFETY: the emulator executes the instruction.
    unsafe { asm!("tilerelease", options(nostack)) };
    assert_eq!(store(0)[0], Configuration { palette: 0, ..configure_all(0, 0) });
    // Another thread has its own tiles.
    load_configuration(&configuration);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| store(0)[0]).join().expect("the thread ends");
        assert_eq!(other.palette, 0);
    });
    assert_eq!(store(0)[0], configuration);
}

/// Executes an instruction without memory operand.
macro_rules! execute {
    ($($instruction:literal),+) => {
        // SAFETY: the emulator executes the instruction, or ends the process.
        unsafe { asm!($($instruction),+, options(nostack)) }
    };
}

const SIGILL: i32 = 4;
const SIGSEGV: i32 = 11;

/// Names a program that a CPU rejects, the signal that ends it, and the program.
type RejectedProgram = (&'static str, i32, fn());

/// The programs that a CPU rejects.
const REJECTED_PROGRAMS: [RejectedProgram; 14] = [
    ("no configuration", SIGILL, || execute!("tilezero tmm0")),
    ("released", SIGILL, || {
        load_configuration(&configure_all(16, 64));
        execute!("tilerelease", "tilezero tmm0");
    }),
    ("palette 2", SIGSEGV, || load_configuration(&Configuration { palette: 2, ..configure_all(16, 64) })),
    ("17 rows", SIGSEGV, || load_configuration(&configure_all(17, 64))),
    ("65 bytes", SIGSEGV, || load_configuration(&configure_all(16, 65))),
    ("rows without bytes", SIGSEGV, || load_configuration(&configure_all(16, 0))),
    ("bytes without rows", SIGSEGV, || load_configuration(&configure_all(0, 64))),
    ("tile 8", SIGSEGV, || {
        let mut configuration = configure_all(16, 64);
        (configuration.rows[8], configuration.row_bytes[8]) = (16, 64);
        load_configuration(&configuration);
    }),
    ("reserved byte", SIGSEGV, || {
        let mut configuration = configure_all(16, 64);
        configuration.reserved[13] = 1;
        load_configuration(&configuration);
    }),
    ("tile without rows", SIGILL, || {
        let mut configuration = configure_all(16, 64);
        (configuration.rows[3], configuration.row_bytes[3]) = (0, 0);
        load_configuration(&configuration);
        execute!("tilezero tmm3");
    }),
    ("same tile twice", SIGILL, || {
        load_configuration(&configure_all(16, 64));
        // tdpbf16ps tmm0, tmm1, tmm1, which the assembler rejects, too
        execute!(".byte 0xc4, 0xe2, 0x72, 0x5c, 0xc1");
    }),
    ("rows differ", SIGILL, || {
        let mut configuration = configure_all(16, 64);
        configuration.rows[1] = 15;
        load_configuration(&configuration);
        execute!("tdpbf16ps tmm0, tmm1, tmm2");
    }),
    ("terms differ", SIGILL, || {
        let mut configuration = configure_all(16, 64);
        configuration.rows[2] = 15;
        load_configuration(&configuration);
        execute!("tdpbf16ps tmm0, tmm1, tmm2");
    }),
    ("odd number of terms", SIGILL, || {
        let mut configuration = configure_all(16, 64);
        configuration.row_bytes[1] = 62;
        load_configuration(&configuration);
        execute!("tdpbf16ps tmm0, tmm1, tmm2");
    }),
];

/// The environment variable that selects the program that a child process runs.
const PROGRAM: &str = "LAUNCH_TEST_AMX_PROGRAM";

#[test]
fn programs_that_a_cpu_rejects_end_with_its_signal() {
    if !load_emulator() {
        return;
    }
    if let Ok(name) = std::env::var(PROGRAM) {
        let program = REJECTED_PROGRAMS.iter().find(|(n, ..)| *n == name);
        // A program that is accepted returns, and the process ends without a signal.
        return program.expect("a program of this name").2();
    }
    for (name, signal, _) in REJECTED_PROGRAMS {
        let test = "amx_emulator::programs_that_a_cpu_rejects_end_with_its_signal";
        let output = run_test_alone(test, PROGRAM, name);
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.signal(), Some(signal), "{name}: {text}");
    }
}

#[test]
fn small_tiles_are_multiplied() {
    if !load_emulator() {
        return;
    }
    // 3 × 4 terms times 4 terms × 2 columns
    let mut configuration = configure_all(16, 64);
    (configuration.rows[0], configuration.row_bytes[0]) = (3, 8);
    (configuration.rows[1], configuration.row_bytes[1]) = (3, 8);
    (configuration.rows[2], configuration.row_bytes[2]) = (2, 8);
    load_configuration(&configuration);
    let bf16 = |x: f32| (x.to_bits() >> 16) as u16;
    let a: Vec<u16> = (1..=12).map(|x| bf16(x as f32)).collect();
    // pairs of terms for each column
    let b: Vec<u16> = [1.0, 2.0, -1.0, 0.5, 3.0, 4.0, 2.0, -3.0].map(bf16).to_vec();
    let mut c = [0.25f32; 6];
    // SAFETY: the tiles have the sizes of the vectors.
    unsafe {
        asm!(
            "tileloadd tmm0, [{c} + {width}]",
            "tileloadd tmm1, [{a} + {width}]",
            "tileloadd tmm2, [{b} + {width}]",
            "tdpbf16ps tmm0, tmm1, tmm2",
            "tilestored [{c} + {width}], tmm0",
            a = in(reg) a.as_ptr(), b = in(reg) b.as_ptr(), c = in(reg) c.as_mut_ptr(), width = in(reg) 8usize,
            options(nostack),
        );
    }
    let columns = [[1.0f32, 2.0, 3.0, 4.0], [-1.0, 0.5, 2.0, -3.0]];
    let expected: [f32; 6] = std::array::from_fn(|i| {
        let terms = columns[i % 2].iter().enumerate();
        0.25 + terms.map(|(p, x)| (i / 2 * 4 + p + 1) as f32 * x).sum::<f32>()
    });
    assert_eq!(c, expected);
}
