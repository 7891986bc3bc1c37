// The order in which the blocks of attention kernels process tiles of rows. A source includes this
// file at most once.
#define LN2 0.6931471805599453f
#define ALL_LANES 0xffffffffu

// Order in which tiles are processed (BlockOrder in attention.rs). Heads whose streamed rows fit
// into the L2 cache together are scheduled together. Among them, the tiles with the most work come
// first.
struct BlockOrder {
    i64 tiles;          // per head
    i64 heads;          // per sequence
    i64 total_heads;    // of all sequences
    i64 heads_together; // that are scheduled together
};
// Position of a tile: its number, head and sequence.
struct BlockPosition {
    int tile, head, sequence;
};

// Returns the position of the tile that is number `block` in the order. If `last_first`, the last
// tiles of a head come first.
DEVICE BlockPosition find_position(const BlockOrder& o, u32 block, bool last_first) {
    u32 tiles = (u32)o.tiles, heads = (u32)o.heads, together = (u32)o.heads_together;
    u32 begin = block / (tiles * together) * together, rest = block - begin * tiles;
    u32 size = (u32)o.total_heads - begin < together ? (u32)o.total_heads - begin : together;
    u32 tile = rest / size, head = begin + rest % size;
    return {(int)(last_first ? tiles - 1 - tile : tile), (int)(head % heads), (int)(head / heads)};
}
