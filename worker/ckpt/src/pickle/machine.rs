//! The machine: opcodes to values.
use super::{BYTES_MAX, Id, MEMO_MAX, Node, Tree, VALUES_MAX, Value};
use std::collections::HashMap;

/// Reads one pickle that fills `input`. `globals` are the classes and functions that it may name, as `module.name`.
/// `Err` is one line that says what is wrong with it.
pub(crate) fn load(input: &[u8], globals: &[&[&'static str]]) -> Result<Tree, String> {
    if input.len() as u64 > BYTES_MAX {
        return Err(format!("it has {} bytes of pickle, more than the {BYTES_MAX} allowed", input.len()));
    }
    let (tree, end) = load_first(input, globals).map_err(|e| e.why)?;
    if end != input.len() {
        return Err(format!("its pickle ends at byte {end}, the file's at {}", input.len()));
    }
    Ok(tree)
}

/// Why a pickle wasn't read.
#[derive(Debug)]
pub(crate) struct Unread {
    pub(crate) why: String,
    /// It reaches beyond the input.
    pub(crate) more: bool,
}

/// Reads the pickle at the beginning of `input`: its values and its length.
pub(crate) fn load_first(input: &[u8], globals: &[&[&'static str]]) -> Result<(Tree, usize), Unread> {
    let mut machine = Machine {
        input,
        at: 0,
        globals,
        stack: Vec::new(),
        marks: Vec::new(),
        nodes: Vec::new(),
        memo: HashMap::new(),
        made: 0,
        more: false,
    };
    let root = machine.run().map_err(|why| Unread { why, more: machine.more })?;
    let (at, tree) = (machine.at, Tree { nodes: machine.nodes, root });
    tree.check_depth().map_err(|why| Unread { why, more: false })?;
    Ok((tree, at))
}

struct Machine<'a> {
    input: &'a [u8],
    at: usize,
    globals: &'a [&'a [&'static str]],
    stack: Vec<Value>,
    /// Heights of the stack.
    marks: Vec<usize>,
    nodes: Vec<Node>,
    memo: HashMap<u32, Value>,
    /// Values pushed so far.
    made: usize,
    /// More bytes were asked for than there are.
    more: bool,
}

impl<'a> Machine<'a> {
    /// All opcodes up to the end of the pickle; the value that it is of.
    fn run(&mut self) -> Result<Value, String> {
        loop {
            let op = self.take(1)?[0];
            if op == b'.' {
                return self.pop();
            }
            self.step(op)?;
        }
    }

    fn step(&mut self, op: u8) -> Result<(), String> {
        match op {
            0x80 => self.protocol(),
            0x95 => self.frame(),
            b'(' => self.mark(),
            b'0' => self.pop().map(|_| ()),
            b'1' => self.pop_mark().map(|_| ()),
            b'2' => self.top().and_then(|v| self.push(v)),
            b'N' => self.push(Value::None),
            0x88 => self.push(Value::Bool(true)),
            0x89 => self.push(Value::Bool(false)),
            b'J' => self.number(4, true),
            b'K' => self.number(1, false),
            b'M' => self.number(2, false),
            0x8a => self.long(1),
            0x8b => self.long(4),
            b'G' => self.float(),
            b'X' => self.text(4),
            0x8c => self.text(1),
            0x8d => self.text(8),
            b'T' | b'B' => self.bytes(4),
            b'U' | b'C' => self.bytes(1),
            0x8e | 0x96 => self.bytes(8),
            b'}' => self.node(Node::Dict(Vec::new())),
            b']' => self.node(Node::List(Vec::new())),
            b')' => self.node(Node::Tuple(Vec::new())),
            0x8f => self.node(Node::Set(Vec::new())),
            b't' => self.gathered(Node::Tuple),
            b'l' => self.gathered(Node::List),
            0x91 => self.gathered(Node::Set),
            b'd' => self.dict(),
            0x85 => self.tuple(1),
            0x86 => self.tuple(2),
            0x87 => self.tuple(3),
            b'a' => self.append(),
            b'e' | 0x90 => self.appends(),
            b's' => self.set_item(),
            b'u' => self.set_items(),
            b'q' => self.size(1).and_then(|i| self.put(i)),
            b'r' => self.size(4).and_then(|i| self.put(i)),
            0x94 => self.put(self.memo.len()),
            b'h' => self.size(1).and_then(|i| self.recall(i)),
            b'j' => self.size(4).and_then(|i| self.recall(i)),
            b'c' => self.global_of_lines(),
            0x93 => self.global_of_stack(),
            b'R' => self.reduce(),
            0x81 => self.new_object(false),
            0x92 => self.new_object(true),
            b'b' => self.build(),
            b'Q' => self.pop().and_then(|v| self.node(Node::Persistent(v))),
            other => Err(format!("its pickle has the opcode {}, which torch files don't use", named(other))),
        }
    }

    /// The next `n` bytes.
    fn take(&mut self, n: usize) -> Result<&'a [u8], String> {
        let rest = &self.input[self.at..];
        let taken = rest.get(..n).ok_or_else(|| {
            self.more = true;
            format!("its pickle claims {n} bytes at byte {}, where it has {}", self.at, rest.len())
        })?;
        self.at += n;
        Ok(taken)
    }

    /// An unsigned number of `width` bytes.
    fn size(&mut self, width: usize) -> Result<usize, String> {
        let mut wide = [0u8; 8];
        wide[..width].copy_from_slice(self.take(width)?);
        usize::try_from(u64::from_le_bytes(wide)).map_err(|e| e.to_string())
    }

    fn push(&mut self, value: Value) -> Result<(), String> {
        self.made += 1;
        if self.made > VALUES_MAX {
            return Err(format!("its pickle makes more than {VALUES_MAX} values"));
        }
        self.stack.push(value);
        Ok(())
    }

    fn node(&mut self, node: Node) -> Result<(), String> {
        let id = Id::try_from(self.nodes.len()).map_err(|e| e.to_string())?;
        self.push(Value::Node(id))?;
        self.nodes.push(node);
        Ok(())
    }

    /// Nothing below the last mark may be taken.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn pop(&mut self) -> Result<Value, String> {
        match self.stack.len() > self.floor() {
            true => self.stack.pop().ok_or_else(underflow),
            false => Err(underflow()),
        }
    }

    fn top(&self) -> Result<Value, String> {
        match self.stack.len() > self.floor() {
            true => self.stack.last().copied().ok_or_else(underflow),
            false => Err(underflow()),
        }
    }

    /// The node on top of the stack.
    fn top_node(&mut self) -> Result<&mut Node, String> {
        match self.top()? {
            Value::Node(id) => self.nodes.get_mut(id as usize).ok_or_else(underflow),
            _ => Err("its pickle adds to something that is no container".into()),
        }
    }

    fn mark(&mut self) -> Result<(), String> {
        if self.marks.len() >= VALUES_MAX {
            return Err(format!("its pickle makes more than {VALUES_MAX} marks"));
        }
        self.marks.push(self.stack.len());
        Ok(())
    }

    /// Everything above the last mark.
    fn pop_mark(&mut self) -> Result<Vec<Value>, String> {
        let mark = self.marks.pop().ok_or_else(underflow)?;
        Ok(self.stack.split_off(mark))
    }

    fn protocol(&mut self) -> Result<(), String> {
        match self.take(1)?[0] {
            0..=5 => Ok(()),
            other => Err(format!("it is a pickle of protocol {other}, not 0 to 5")),
        }
    }

    fn frame(&mut self) -> Result<(), String> {
        let (len, left) = (self.size(8)?, self.input.len() - self.at);
        self.more |= len > left;
        match len <= left {
            true => Ok(()),
            false => Err(format!("its pickle claims a frame of {len} bytes, where it has {left}")),
        }
    }

    fn number(&mut self, width: usize, signed: bool) -> Result<(), String> {
        let n = self.size(width)? as i64;
        self.push(Value::Int(if signed { i64::from(n as u32 as i32) } else { n }))
    }

    fn long(&mut self, width: usize) -> Result<(), String> {
        let len = self.size(width)?;
        let digits = self.take(len)?;
        if len > 8 {
            return self.node(Node::BigInt);
        }
        let negative = digits.last().is_some_and(|b| b & 0x80 != 0);
        let mut wide = if negative { [0xffu8; 8] } else { [0u8; 8] };
        wide[..len].copy_from_slice(digits);
        self.push(Value::Int(i64::from_le_bytes(wide)))
    }

    fn float(&mut self) -> Result<(), String> {
        let mut wide = [0u8; 8];
        wide.copy_from_slice(self.take(8)?);
        self.push(Value::Float(f64::from_be_bytes(wide)))
    }

    fn text(&mut self, width: usize) -> Result<(), String> {
        let len = self.size(width)?;
        let text = std::str::from_utf8(self.take(len)?)
            .map_err(|_| format!("its pickle has text before byte {} that is no UTF-8", self.at))?;
        self.node(Node::Str(text.into()))
    }

    fn bytes(&mut self, width: usize) -> Result<(), String> {
        let len = self.size(width)?;
        self.take(len)?;
        self.node(Node::Bytes)
    }

    fn gathered(&mut self, make: impl Fn(Vec<Value>) -> Node) -> Result<(), String> {
        let values = self.pop_mark()?;
        self.node(make(values))
    }

    fn dict(&mut self) -> Result<(), String> {
        let values = self.pop_mark()?;
        self.node(Node::Dict(paired(&values)?))
    }

    fn tuple(&mut self, n: usize) -> Result<(), String> {
        let start = self.stack.len().checked_sub(n).filter(|&s| s >= self.floor()).ok_or_else(underflow)?;
        let values = self.stack.split_off(start);
        self.node(Node::Tuple(values))
    }

    fn append(&mut self) -> Result<(), String> {
        let value = self.pop()?;
        self.add(&[value])
    }

    fn appends(&mut self) -> Result<(), String> {
        let values = self.pop_mark()?;
        self.add(&values)
    }

    fn add(&mut self, values: &[Value]) -> Result<(), String> {
        match self.top_node()? {
            Node::List(list) | Node::Set(list) => {
                list.extend_from_slice(values);
                Ok(())
            }
            _ => Err("its pickle appends to something that is no list".into()),
        }
    }

    fn set_item(&mut self) -> Result<(), String> {
        let value = self.pop()?;
        let key = self.pop()?;
        self.set(&[key, value])
    }

    fn set_items(&mut self) -> Result<(), String> {
        let values = self.pop_mark()?;
        self.set(&values)
    }

    fn set(&mut self, values: &[Value]) -> Result<(), String> {
        match self.top_node()? {
            Node::Dict(pairs) => {
                pairs.extend(paired(values)?);
                Ok(())
            }
            _ => Err("its pickle sets items of something that is no dict".into()),
        }
    }

    fn put(&mut self, index: usize) -> Result<(), String> {
        let value = self.top()?;
        let index = u32::try_from(index).map_err(|e| e.to_string())?;
        self.memo.insert(index, value);
        match self.memo.len() > MEMO_MAX {
            true => Err(format!("its pickle memorises more than {MEMO_MAX} values")),
            false => Ok(()),
        }
    }

    fn recall(&mut self, index: usize) -> Result<(), String> {
        let known = u32::try_from(index).ok().and_then(|i| self.memo.get(&i).copied());
        self.push(known.ok_or_else(|| format!("its pickle recalls value {index}, which it never memorised"))?)
    }

    fn line(&mut self) -> Result<&'a str, String> {
        let rest = &self.input[self.at..];
        let Some(end) = rest.iter().position(|&b| b == b'\n') else {
            self.more = true;
            return Err("its pickle has a name without an end".into());
        };
        self.at += end + 1;
        std::str::from_utf8(&rest[..end]).map_err(|_| "its pickle has a name that is no UTF-8".into())
    }

    fn global_of_lines(&mut self) -> Result<(), String> {
        let (module, name) = (self.line()?, self.line()?);
        self.global(module, name)
    }

    fn global_of_stack(&mut self) -> Result<(), String> {
        let (name, module) = (self.pop()?, self.pop()?);
        let text = |v| match v {
            Value::Node(id) => match &self.nodes[id as usize] {
                Node::Str(s) => Ok(s.to_string()),
                _ => Err("its pickle names a class by something that is no text"),
            },
            _ => Err("its pickle names a class by something that is no text"),
        };
        let (module, name) = (text(module)?, text(name)?);
        self.global(&module, &name)
    }

    fn global(&mut self, module: &str, name: &str) -> Result<(), String> {
        let known = |g: &&&'static str| {
            g.strip_prefix(module).and_then(|rest| rest.strip_prefix('.')).is_some_and(|rest| rest == name)
        };
        match self.globals.iter().flat_map(|list| list.iter()).find(known) {
            Some(global) => self.node(Node::Global(global)),
            None => {
                let shown: String =
                    format!("{module}.{name}").chars().filter(|c| !c.is_control()).take(120).collect();
                Err(format!(
                    "its pickle names {shown}, which such a file doesn't need; nothing of it is executed and the file is refused"
                ))
            }
        }
    }

    /// The global and the tuple of arguments that a call has on the stack.
    fn call(&mut self) -> Result<(&'static str, Value), String> {
        let (args, class) = (self.pop()?, self.pop()?);
        let tuple = matches!(args, Value::Node(id) if matches!(self.nodes[id as usize], Node::Tuple(_)));
        match class {
            Value::Node(id) => match self.nodes[id as usize] {
                Node::Global(class) if tuple => Ok((class, args)),
                _ => Err("its pickle calls something that is no class or function".into()),
            },
            _ => Err("its pickle calls something that is no class or function".into()),
        }
    }

    fn reduce(&mut self) -> Result<(), String> {
        let (class, args) = self.call()?;
        match class {
            "collections.OrderedDict" => {
                let pairs = self.ordered_dict(args)?;
                self.node(Node::Dict(pairs))
            }
            _ => self.node(Node::Object { class, args, state: Value::None }),
        }
    }

    /// The pairs of `OrderedDict()` or `OrderedDict([[key, value], …])`.
    fn ordered_dict(&self, args: Value) -> Result<Vec<(Value, Value)>, String> {
        let values = |v: Value| match v {
            Value::Node(id) => match &self.nodes[id as usize] {
                Node::List(v) | Node::Tuple(v) => Some(v.as_slice()),
                _ => None,
            },
            _ => None,
        };
        let wrong = || "its pickle makes an OrderedDict of something else than pairs".to_owned();
        match values(args).ok_or_else(wrong)? {
            [] => Ok(Vec::new()),
            [list] => {
                let pair = |&v: &Value| match values(v) {
                    Some(&[key, value]) => Ok((key, value)),
                    _ => Err(wrong()),
                };
                let list = values(*list).ok_or_else(wrong)?;
                // shared items would otherwise be copied more often than they were made
                match list.len() + self.made <= VALUES_MAX {
                    true => list.iter().map(pair).collect(),
                    false => Err(format!("its pickle makes more than {VALUES_MAX} values")),
                }
            }
            _ => Err(wrong()),
        }
    }

    fn new_object(&mut self, with_keywords: bool) -> Result<(), String> {
        if with_keywords {
            let keywords = self.pop()?;
            let none = matches!(keywords, Value::Node(id) if matches!(&self.nodes[id as usize], Node::Dict(d) if d.is_empty()));
            if !none {
                return Err("its pickle makes an object with keywords, which torch files don't".into());
            }
        }
        let (class, args) = self.call()?;
        match class {
            "collections.OrderedDict" => self.node(Node::Dict(Vec::new())),
            _ => self.node(Node::Object { class, args, state: Value::None }),
        }
    }

    fn build(&mut self) -> Result<(), String> {
        let given = self.pop()?;
        match self.top_node()? {
            Node::Object { state, .. } => {
                *state = given;
                Ok(())
            }
            // attributes of an OrderedDict: versions of modules
            Node::Dict(_) => Ok(()),
            _ => Err("its pickle gives a state to something that is no object".into()),
        }
    }
}

fn underflow() -> String {
    "its pickle takes more values than it has made".into()
}

fn paired(values: &[Value]) -> Result<Vec<(Value, Value)>, String> {
    let (pairs, rest) = values.as_chunks::<2>();
    match rest.is_empty() {
        true => Ok(pairs.iter().map(|&[key, value]| (key, value)).collect()),
        false => Err("its pickle has a key without a value".into()),
    }
}

/// An opcode as people know it.
fn named(op: u8) -> String {
    let name = match op {
        b'i' => "INST",
        b'o' => "OBJ",
        b'P' => "PERSID",
        b'g' => "GET",
        b'p' => "PUT",
        b'I' => "INT",
        b'L' => "LONG",
        b'F' => "FLOAT",
        b'S' => "STRING",
        b'V' => "UNICODE",
        0x82..=0x84 => "EXT",
        0x97 => "NEXT_BUFFER",
        0x98 => "READONLY_BUFFER",
        _ => return format!("0x{op:02x}"),
    };
    format!("0x{op:02x} ({name})")
}
