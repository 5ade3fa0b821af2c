"""ACE for vector neurons: VN-DGCNN and VN-PointNet."""
