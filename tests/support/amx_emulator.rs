//! Emulates AMX for tests on CPUs without it: a handler of SIGILL that decodes and executes the
//! instructions with which the CPU backend multiplies tiles.
//!
//! The tiles are state of the thread, as on a CPU. Any other instruction is passed to the previous
//! handler.
use std::cell::RefCell;
use std::mem::MaybeUninit;
use std::sync::OnceLock;

/// Number of tiles.
const TILES: usize = 8;
/// Number of rows of a tile.
const ROWS: usize = 16;
/// Number of bytes in a row of a tile.
const ROW_BYTES: usize = 64;

/// The tiles of a thread, with their shapes.
struct Tiles {
    rows: [usize; TILES],
    row_bytes: [usize; TILES],
    data: [[[u8; ROW_BYTES]; ROWS]; TILES],
}

impl Tiles {
    const EMPTY: Tiles =
        Tiles { rows: [0; TILES], row_bytes: [0; TILES], data: [[[0; ROW_BYTES]; ROWS]; TILES] };

    /// Clears the tile.
    fn zero(&mut self, tile: usize) {
        self.data[tile] = [[0; ROW_BYTES]; ROWS];
    }

    /// Returns bf16 element `i` of a row of a tile as `f32`.
    fn get_bf16(&self, tile: usize, row: usize, i: usize) -> f32 {
        let [low, high] = [self.data[tile][row][2 * i], self.data[tile][row][2 * i + 1]];
        f32::from_bits(u32::from_le_bytes([0, 0, low, high]))
    }

    /// Executes `TDPBF16PS c, a, b`.
    fn multiply(&mut self, c: usize, a: usize, b: usize) {
        let columns = self.row_bytes[c] / 4;
        let pairs = self.row_bytes[a] / 4;
        for m in 0..self.rows[c] {
            for n in 0..columns {
                let mut sums = [0.0; 2];
                for k in 0..pairs {
                    for (parity, sum) in sums.iter_mut().enumerate() {
                        let (x, y) =
                            (self.get_bf16(a, m, 2 * k + parity), self.get_bf16(b, k, 2 * n + parity));
                        *sum = fma(x, y, *sum);
                    }
                }
                let at = &mut self.data[c][m][4 * n..4 * n + 4];
                let old = f32::from_le_bytes(at.try_into().expect("four bytes"));
                let new = add(old, add(sums[0], sums[1]));
                at.copy_from_slice(&new.to_le_bytes());
            }
        }
    }
}

thread_local! {
    static STATE: RefCell<Tiles> = const { RefCell::new(Tiles::EMPTY) };
}

/// Replaces a subnormal number by zero.
fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0.0f32.copysign(x) } else { x }
}

/// Computes a fused multiply-add of flushed inputs, and replaces a result that is subnormal after
/// rounding by zero.
fn fma(a: f32, b: f32, c: f32) -> f32 {
    let (a, b, c) = (flush(a), flush(b), flush(c));
    let result = flush(a.mul_add(b, c));
    if result.abs() == f32::MIN_POSITIVE {
        // The largest magnitude that is subnormal if it is rounded with an unlimited exponent.
        let limit = f64::from(f32::MIN_POSITIVE) * (1.0 - f64::from_bits((1023 - 25) << 52));
        let exact = f64::from(a) * f64::from(b) + f64::from(c);
        return if exact.abs() < limit { 0.0f32.copysign(result) } else { result };
    }
    result
}

/// Adds flushed numbers and flushes the sum.
fn add(a: f32, b: f32) -> f32 {
    flush(flush(a) + flush(b))
}

/// The handler of SIGILL before this one.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// Installs the emulator in this process, once.
pub(crate) fn install() {
    static INSTALLED: OnceLock<()> = OnceLock::new();
    INSTALLED.get_or_init(|| {
        // SAFETY: the structures are initialized by the calls or are valid as zeros.
        unsafe {
            let mut previous = MaybeUninit::zeroed();
            assert_eq!(libc::sigaction(libc::SIGILL, std::ptr::null(), previous.as_mut_ptr()), 0);
            let _ = PREVIOUS.set(previous.assume_init());
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handle as *const () as usize;
            // Rust's stack for signals is too small for the handler, and the kernels use no red
            // zone.
            action.sa_flags = libc::SA_SIGINFO;
            assert_eq!(libc::sigaction(libc::SIGILL, &action, std::ptr::null_mut()), 0);
        }
    });
}

/// Handles SIGILL: executes an AMX instruction, or restores the previous handler, which then gets
/// the signal.
extern "C" fn handle(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes the context of the interrupted thread.
    let registers = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    // SAFETY: the instruction that raised the signal is readable. No AMX instruction is longer.
    let executed = unsafe { execute(registers) };
    if let Some(length) = executed {
        registers[libc::REG_RIP as usize] += length as i64;
    } else if let Some(previous) = PREVIOUS.get() {
        // SAFETY: the previous handler was valid. The instruction runs again after the return.
        unsafe { libc::sigaction(libc::SIGILL, previous, std::ptr::null_mut()) };
    }
}

/// The register of the context that has a number in the encoding of instructions.
const REGISTERS: [libc::c_int; 16] = [
    libc::REG_RAX,
    libc::REG_RCX,
    libc::REG_RDX,
    libc::REG_RBX,
    libc::REG_RSP,
    libc::REG_RBP,
    libc::REG_RSI,
    libc::REG_RDI,
    libc::REG_R8,
    libc::REG_R9,
    libc::REG_R10,
    libc::REG_R11,
    libc::REG_R12,
    libc::REG_R13,
    libc::REG_R14,
    libc::REG_R15,
];

/// Executes the instruction at the program counter if it belongs to AMX, and returns its length.
///
/// # Safety
///
/// The registers must be those of this thread at an instruction that raised SIGILL.
unsafe fn execute(registers: &[i64; 23]) -> Option<usize> {
    let at = registers[libc::REG_RIP as usize] as *const u8;
    // SAFETY: guaranteed by the caller, byte for byte.
    let byte = |i: usize| unsafe { *at.add(i) };
    // VEX with three bytes, map 0F38, 128 bits, W0.
    if byte(0) != 0xc4 || byte(1) & 0x1f != 2 || byte(2) & 0x84 != 0 {
        return None;
    }
    let (prefix, source) = (byte(2) & 3, usize::from(!byte(2) >> 3 & 15));
    let (opcode, modrm) = (byte(3), byte(4));
    let (mode, reg, rm) = (modrm >> 6, usize::from(modrm >> 3 & 7), usize::from(modrm & 7));
    STATE.with_borrow_mut(|tiles| {
        if mode == 3 {
            match (opcode, prefix) {
                (0x49, 0) if modrm == 0xc0 => *tiles = Tiles::EMPTY,
                (0x49, 3) if rm == 0 => tiles.zero(reg),
                (0x5c, 2) if source < TILES => tiles.multiply(reg, rm, source),
                _ => return None,
            }
            return Some(5);
        }
        let value = |number: usize| registers[REGISTERS[number] as usize];
        let (x, b) = (usize::from(!byte(1) >> 6 & 1) * 8, usize::from(!byte(1) >> 5 & 1) * 8);
        let has_sib = rm == 4;
        let after = if has_sib { 6 } else { 5 };
        let (base, index) = match has_sib {
            true => {
                let sib = byte(5);
                let index = usize::from(sib >> 3 & 7) + x;
                let scaled = if index == 4 { 0 } else { value(index) << (sib >> 6) };
                (usize::from(sib & 7) + b, scaled)
            }
            false => (rm + b, 0),
        };
        // An address without a base register, or relative to the program counter, is not used.
        if mode == 0 && base & 7 == 5 {
            return None;
        }
        let (displacement, length) = match mode {
            0 => (0, after),
            1 => (i64::from(byte(after) as i8), after + 1),
            _ => {
                let bytes = [byte(after), byte(after + 1), byte(after + 2), byte(after + 3)];
                (i64::from(i32::from_le_bytes(bytes)), after + 4)
            }
        };
        let address = value(base).wrapping_add(displacement);
        match (opcode, prefix) {
            (0x49, 0) if reg == 0 => {
                // SAFETY: the operand of LDTILECFG has 64 bytes.
                let config = unsafe { &*(address.wrapping_add(index) as *const [u8; 64]) };
                *tiles = Tiles::EMPTY;
                for tile in 0..TILES {
                    tiles.row_bytes[tile] =
                        usize::from(u16::from_le_bytes([config[16 + 2 * tile], config[17 + 2 * tile]]));
                    tiles.rows[tile] = usize::from(config[48 + tile]);
                }
            }
            // TILELOADD and TILESTORED. The index is the distance between rows.
            (0x4b, 2 | 3) if has_sib => {
                let (rows, bytes) = (tiles.rows[reg], tiles.row_bytes[reg]);
                if prefix == 3 {
                    tiles.zero(reg);
                }
                for row in 0..rows {
                    let memory = address.wrapping_add(index * row as i64) as *mut u8;
                    let tile = tiles.data[reg][row].as_mut_ptr();
                    // SAFETY: the program accesses this row of memory.
                    unsafe {
                        match prefix {
                            3 => std::ptr::copy_nonoverlapping(memory, tile, bytes),
                            _ => std::ptr::copy_nonoverlapping(tile, memory, bytes),
                        }
                    }
                }
            }
            _ => return None,
        }
        Some(length)
    })
}
