//! Reads the resources that kernels use from compiled images (cubin), which are ELF files.

/// Attribute of a kernel in the section `.nv.info`: bytes of its stack frame in local memory.
const FRAME_SIZE: u8 = 0x11;
/// Attribute of a kernel in the section `.nv.info`: number of registers of a thread.
const REGISTER_COUNT: u8 = 0x2f;
/// Format of an attribute in the section `.nv.info` whose value has a 16-bit length.
const SIZED_VALUE: u8 = 4;

/// The resources that a kernel in a compiled image uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct KernelResources {
    /// Name of the kernel.
    pub(crate) name: String,
    /// Number of registers of each thread.
    pub(crate) registers: u64,
    /// Bytes of local memory of each thread, for arrays and spilled registers.
    pub(crate) local_bytes: u64,
    /// Bytes of static shared memory of each block. Since sm_90 the system reserves some of them.
    pub(crate) static_shared_bytes: u64,
}

/// An ELF image of 64 bits with its table of sections.
struct Image<'a> {
    bytes: &'a [u8],
    /// Offset of the first section header, and bytes of each.
    headers: (u64, u64),
    section_count: u64,
    /// Offset of the names of sections.
    names: u64,
}

impl Image<'_> {
    fn parse(bytes: &[u8]) -> Image<'_> {
        let mut image = Image { bytes, headers: (0, 0), section_count: 0, names: 0 };
        image.headers = (image.number(0x28, 8), image.number(0x3a, 2));
        image.section_count = image.number(0x3c, 2);
        image.names = image.content(image.number(0x3e, 2)).0;
        image
    }

    /// Reads a little-endian number of `bytes` bytes at the offset `at`.
    fn number(&self, at: u64, bytes: u64) -> u64 {
        let bytes = &self.bytes[at as usize..(at + bytes) as usize];
        bytes.iter().rev().fold(0, |n, byte| n << 8 | u64::from(*byte))
    }

    /// Reads the text that ends with a zero byte at the offset `at`.
    fn text(&self, at: u64) -> String {
        let end = self.bytes[at as usize..].split(|byte| *byte == 0).next().unwrap_or(&[]);
        String::from_utf8_lossy(end).into_owned()
    }

    /// Returns a field of the header of a section.
    fn field(&self, section: u64, offset: u64, bytes: u64) -> u64 {
        self.number(self.headers.0 + section * self.headers.1 + offset, bytes)
    }

    /// Returns the offset and the number of bytes of a section.
    fn content(&self, section: u64) -> (u64, u64) {
        (self.field(section, 0x18, 8), self.field(section, 0x20, 8))
    }

    /// Returns the numbers and names of all sections.
    fn sections(&self) -> impl Iterator<Item = (u64, String)> {
        (0..self.section_count).map(|section| (section, self.text(self.names + self.field(section, 0, 4))))
    }

    /// Returns the number of the section `name`.
    fn find_section(&self, name: &str) -> u64 {
        self.sections().find(|(_, found)| found == name).unwrap_or_else(|| panic!("no section {name}")).0
    }

    /// Returns the attributes in the section `.nv.info` that belong to a symbol: kind, name of the
    /// symbol, and value.
    fn list_attributes(&self) -> Vec<(u8, String, u64)> {
        let symbols = self.find_section(".symtab");
        let (symbol_table, names) = (self.content(symbols).0, self.content(self.field(symbols, 0x28, 4)).0);
        let (mut at, bytes) = self.content(self.find_section(".nv.info"));
        let (end, mut attributes) = (at + bytes, Vec::new());
        while at < end {
            let (format, kind, size) = (self.number(at, 1), self.number(at + 1, 1), self.number(at + 2, 2));
            if format != u64::from(SIZED_VALUE) {
                at += 4;
                continue;
            }
            if size == 8 {
                let symbol = symbol_table + 24 * self.number(at + 4, 4);
                let name = self.text(names + self.number(symbol, 4));
                attributes.push((kind as u8, name, self.number(at + 8, 4)));
            }
            at += 4 + size;
        }
        attributes
    }
}

/// Returns the resources of each kernel in the compiled image `image`.
pub(crate) fn read_kernel_resources(image: &[u8]) -> Vec<KernelResources> {
    let image = Image::parse(image);
    let (sections, attributes): (Vec<_>, _) = (image.sections().collect(), image.list_attributes());
    let names = sections.iter().filter_map(|(_, name)| name.strip_prefix(".text."));
    let describe = |name: &str| {
        let find = |kind| attributes.iter().find(|(k, of, _)| *k == kind && of == name).map(|found| found.2);
        let shared = format!(".nv.shared.{name}");
        let shared = sections.iter().find(|(_, section)| *section == shared);
        KernelResources {
            name: name.to_owned(),
            registers: find(REGISTER_COUNT).unwrap_or_else(|| panic!("the registers of {name} are missing")),
            local_bytes: find(FRAME_SIZE).unwrap_or_else(|| panic!("the stack frame of {name} is missing")),
            static_shared_bytes: shared.map_or(0, |(section, _)| image.content(*section).1),
        }
    };
    names.map(describe).collect()
}
