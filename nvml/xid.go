package nvml

// XidClass says what kind of fault an Xid number stands for.
type XidClass string

// The classes.
const (
	// XidApplication is a fault of the program on the GPU.
	XidApplication XidClass = "application"
	// XidHardware is a fault of the GPU, its memory, links or firmware.
	XidHardware XidClass = "hardware"
	// XidUnclassified is a number not in the table.
	XidUnclassified XidClass = "unclassified"
)

// xids is what an operator should read beside a number. Source: NVIDIA, "XID
// Errors" (GPU deployment and management documentation). Which of them keep a
// worker out is policy, not this table.
var xids = map[uint32]struct {
	class XidClass
	words string
}{
	13:  {XidApplication, "graphics engine exception"},
	31:  {XidApplication, "GPU memory page fault"},
	43:  {XidApplication, "GPU stopped processing a program"},
	45:  {XidApplication, "program was cleaned up after an earlier error"},
	48:  {XidHardware, "double bit ECC error"},
	63:  {XidHardware, "memory row remapping or page retirement recorded"},
	64:  {XidHardware, "memory row remapping or page retirement failed"},
	68:  {XidApplication, "video decoder exception"},
	74:  {XidHardware, "NVLink error"},
	79:  {XidHardware, "fell off the bus"},
	92:  {XidHardware, "high rate of single bit ECC errors"},
	94:  {XidHardware, "contained memory error"},
	95:  {XidHardware, "uncontained memory error"},
	109: {XidApplication, "context switch timeout"},
	119: {XidHardware, "GPU firmware does not answer"},
	120: {XidHardware, "GPU firmware error"},
}

// DescribeXid says what kind of fault a number is, and in words which one;
// the words are empty for a number that is not known.
func DescribeXid(xid uint32) (XidClass, string) {
	if x, ok := xids[xid]; ok {
		return x.class, x.words
	}
	return XidUnclassified, ""
}
